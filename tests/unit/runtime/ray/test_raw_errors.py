# SPDX-License-Identifier: Apache-2.0
"""Errors of calls through raw handles: as they were raised, unless Ray cannot send their text."""

import traceback

import pytest

from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.runtime.ray.processes import member
from dlrover.python.rl.runtime.ray.processes.member import MemberActor
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext


class Failing(BaseWorkload):
    def act(self, text):
        raise ValueError(text)


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setattr(member, "configure_logging", lambda process: None)  # of a process of its own
    made = MemberActor(ProcessId("ACTOR", 0), 1, None, None)
    made._host = MemberHost(1)
    made._host.start(Failing, MemberContext(role=RLRoleType.ACTOR), None, {})
    return made


def test_an_error_is_raised_as_it_is(actor):
    with pytest.raises(ValueError, match="no luck"):
        actor._run("act", ["no luck"], {})


def test_an_error_with_half_of_an_emoji_is_raised_with_its_words(actor):
    with pytest.raises(InvocationError, match="ValueError: the model wrote \\?") as caught:
        actor._run("act", ["the model wrote \ud83d"], {})
    "".join(traceback.format_exception(caught.value)).encode()
