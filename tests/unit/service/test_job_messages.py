# SPDX-License-Identifier: Apache-2.0
"""Records become messages, whatever text is in them."""

import pytest

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.control.events import Cause, CauseKind
from dlrover.python.rl.service.jobs.records import JobEvent, JobRecord
from dlrover.python.rl.service.messages import details_of, event_message, job_message

TEXT = "the model wrote \ud83d"


def test_half_of_an_emoji_hides_no_job():
    record = JobRecord("j", "r", "o", "t", reason=TEXT, detail=TEXT, activity=TEXT)
    message = job_message(record)
    assert {message.reason, message.detail, message.activity} == {"the model wrote ?"}
    event = event_message(JobEvent(1, 0.0, "j", "r", "step", TEXT, metrics={TEXT: 1.0}))
    assert (event.message, dict(event.metrics)) == ("the model wrote ?", {"the model wrote ?": 1.0})
    assert details_of(CallError(TEXT)) == "the model wrote ?"


@pytest.mark.parametrize("text", [TEXT, "the model wrote \udcff"])
def test_a_cause_has_valid_text(text):
    cause = Cause(CauseKind.USER_ERROR, "trainer", text, text)
    assert (cause.message, cause.detail) == ("the model wrote ?", "the model wrote ?")
