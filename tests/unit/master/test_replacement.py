# SPDX-License-Identifier: Apache-2.0
"""What a trainer is told of the worker that it found dead."""

import pytest

from dlrover.python.rl.common.errors import JobFailed
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    MemberLost,
    MemberStarted,
    Placed,
    Process,
    RecoveryScope,
    RoleSettings,
    StepsOpened,
    StopRequested,
    Submitted,
    TrainerStarted,
)
from dlrover.python.rl.control.machine import replay
from dlrover.python.rl.master.process.rl_master import find_up, replacement

GONE = Cause(CauseKind.PROCESS_DIED, "ACTOR[1]", "gone")
BEGUN = (
    Submitted("toy", {"ACTOR": RoleSettings(2, RecoveryScope.GROUP), "ROLLOUT": RoleSettings(2)}),
    Placed(1),
    *(MemberStarted(role, rank, 1, Process("n", rank + 1)) for role in ("ACTOR", "ROLLOUT") for rank in (0, 1)),
    TrainerStarted(1, Process("n", 9)),
    StepsOpened(1),
)


def after(*events):
    return replay((float(at), event) for at, event in enumerate((*BEGUN, *events)))


def replaced(state, role, rank, incarnation):
    name_of = lambda role, rank, first, standby: f"{role}-{rank}.{first}.{standby}"  # noqa: E731
    return replacement(state, role, rank, incarnation, name_of)


def test_a_member_is_up_as_the_incarnation_that_it_is():
    state = after()
    assert find_up(state, "ROLLOUT", 0, 1) is state.members[ProcessId("ROLLOUT", 0)]
    assert find_up(state, "ROLLOUT", 0, 2) is None
    assert find_up(state, "ROLLOUT", 5, 1) is None
    lost = after(MemberLost("ROLLOUT", 0, 1, GONE))
    assert find_up(lost, "ROLLOUT", 0, 1) is None and find_up(lost, "ROLLOUT", 0, 2) is None


def test_there_is_no_replacement_before_it_is_up():
    assert replaced(after(), "ROLLOUT", 0, 1) is None
    lost = (MemberLost("ROLLOUT", 0, 1, GONE),)
    assert replaced(after(*lost), "ROLLOUT", 0, 1) is None
    state = after(*lost, MemberStarted("ROLLOUT", 0, 2, Process("n", 7)))
    assert replaced(state, "ROLLOUT", 0, 1) == {
        0: (2, "ROLLOUT-0.2.-1"),
        1: (1, "ROLLOUT-1.1.-1"),
    }
    assert replaced(state, "ROLLOUT", 0, 2) is None


def test_a_group_is_there_as_a_whole():
    lost = (MemberLost("ACTOR", 1, 1, GONE), MemberStarted("ACTOR", 1, 2, Process("n", 7)))
    assert replaced(after(*lost), "ACTOR", 1, 1) is None
    state = after(*lost, MemberStarted("ACTOR", 0, 2, Process("n", 8)))
    assert set(replaced(state, "ACTOR", 1, 1)) == {0, 1}


def test_a_job_that_ends_replaces_nothing():
    state = after(MemberLost("ROLLOUT", 0, 1, GONE), StopRequested("enough"))
    with pytest.raises(JobFailed, match=r"ROLLOUT\[0\] is not replaced: the job is ending. enough"):
        replaced(state, "ROLLOUT", 0, 1)
