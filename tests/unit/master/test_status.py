# SPDX-License-Identifier: Apache-2.0
"""What is said of a job: in the log when something is recovered, and to those who follow its reports."""

from dataclasses import replace

from dlrover.python.rl.control.events import Cause, CauseKind, MemberLost, MemberStarted, TrainerLost, TrainerStarted
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.master.process.status import Position, recoveries

BEFORE = JobState()
AFTER = replace(BEFORE, incarnation=1)
GONE = Cause(CauseKind.PROCESS_DIED, "ROLLOUT[1]", "the process is gone")


def said(event, after=AFTER):
    return list(recoveries(BEFORE, after, event))


def test_a_loss_is_said_with_its_cause():
    assert said(MemberLost("ROLLOUT", 1, 1, GONE)) == ["ROLLOUT[1]: process_died: the process is gone"]
    cause = replace(GONE, kind=CauseKind.HUNG, who="trainer", message="no sign of life for 3.2 s")
    assert said(TrainerLost(1, cause)) == ["trainer: hung: no sign of life for 3.2 s"]


def test_who_is_back_is_said_and_how():
    assert said(MemberStarted("ROLLOUT", 1, 2)) == ["ROLLOUT[1] is back as incarnation 2 (a new process)"]
    assert said(MemberStarted("ROLLOUT", 1, 2, standby=0)) == ["ROLLOUT[1] is back as incarnation 2 (standby 0)"]
    assert said(TrainerStarted(2)) == ["the trainer is back as epoch 2"]


def test_a_first_start_and_what_changes_nothing_are_not_worth_a_line():
    assert said(MemberStarted("ROLLOUT", 1, 1)) == said(TrainerStarted(1)) == []
    assert said(MemberLost("ROLLOUT", 1, 1, GONE), after=BEFORE) == []


def test_reports_are_read_on_where_the_reader_was_and_anew_from_a_master_that_has_restarted():
    assert Position().since("boot") == 0
    assert Position("boot", 7).since("boot") == 7
    assert Position("boot", 7).since("another") == 0
