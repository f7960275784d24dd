# SPDX-License-Identifier: Apache-2.0
"""A member whose process goes on as a later incarnation refuses what was meant for the earlier one."""

import pytest

from dlrover.python.rl.common.errors import CallSkipped, WorkloadDied
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.runtime.process.arguments import CallHeader
from dlrover.python.rl.runtime.process.host import MemberHost
from dlrover.python.rl.runtime.ray.processes import member
from dlrover.python.rl.runtime.ray.processes.member import MemberActor
from dlrover.python.rl.runtime.ray.processes.port import is_loss
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext


class Workload(BaseWorkload):
    closed = 0

    def hello(self):
        return "hello"

    def close(self):
        type(self).closed += 1


def started(actor, incarnation):
    actor._host = MemberHost(incarnation)
    actor._host.start(Workload, MemberContext(), None, {})


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setattr(member, "configure_logging", lambda who: None)
    made = MemberActor(ProcessId("ACTOR", 0), 1, None, None)
    started(made, 1)
    return made


def call(actor, incarnation, epoch=1):
    return actor.dlrover_invoke(CallHeader((1, 0), "hello", incarnation=incarnation, epoch=epoch).pack())


def test_calls_to_the_earlier_incarnation_find_it_gone(actor):
    assert call(actor, 1) == actor._run("hello", (), {}) == "hello"
    actor.dlrover_leave()
    assert Workload.closed == 1
    for refused in (lambda: call(actor, 1), lambda: actor._run("hello", (), {})):
        with pytest.raises(WorkloadDied) as died:
            refused()
        assert died.value.incarnation == 1 and is_loss(died.value)
    with pytest.raises(CallSkipped, match="not started yet"):
        call(actor, 2)
    started(actor, 2)
    with pytest.raises(WorkloadDied):
        actor._run("hello", (), {})  # queued since before: the object has no state yet
    with pytest.raises(WorkloadDied):
        call(actor, 1)
    assert call(actor, 2) == actor._run("hello", (), {}) == "hello"
