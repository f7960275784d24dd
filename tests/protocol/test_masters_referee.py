# SPDX-License-Identifier: Apache-2.0
"""Steps that break a rule, before the referee of the masters' simulation."""

from dataclasses import replace

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.commands import Release, StartMembers, StartTrainer, Wait
from dlrover.python.rl.control.events import CauseKind, Progressed
from dlrover.python.rl.control.state import EndReason, Phase
from tests.protocol.loops_world import Violation
from tests.protocol.masters_referee import Referee
from tests.support.control_runs import OPEN, Run, lost

LOST = lost("ROLLOUT", 0)
GROUP_LOST = lost("ACTOR", 0)


def judge(event, change=lambda state: state, orders=None, reads_back=True, mourned=()):
    """Let the referee see one step of a running job with a changed outcome."""
    run, referee = Run(*OPEN), Referee(lambda process_id, number: True)
    referee._mourned.update(mourned)
    ((_, before, after, commands, at_s),) = referee.expect(run.state, [event], 99.0)
    changed = change(after)
    step = (event, before, changed if reads_back else after, commands, at_s)
    referee.handled([step], [(event, before, changed, commands if orders is None else orders)])


def ended_by_limit(state):
    return replace(state, phase=Phase.ENDING, ended_by=EndReason.RESTART_LIMIT)


@pytest.mark.parametrize("event", [LOST, GROUP_LOST, Progressed(1, 1)])
def test_referee_of_machines_step_is_silent(event):
    judge(event)


@pytest.mark.parametrize(
    ("event", "changes", "words"),
    [
        (Progressed(1, 1), {"orders": (StartTrainer(1, fresh=True),)}, "changed nothing and ordered"),
        (LOST, {"change": lambda state: replace(state, committed=7), "reads_back": False}, "leads to another state"),
        (LOST, {"change": lambda state: replace(state, epoch=0)}, "a number has fallen"),
        (LOST, {"change": lambda state: replace(state, recoveries={"ROLLOUT": 2})}, "2 recoveries for"),
        (LOST, {"change": lambda state: replace(state, restarts_by={"job": 2})}, "one restart of the job counted"),
        (LOST, {"mourned": [(ProcessId("ROLLOUT", 0), 1)]}, "were recovered before"),
        (LOST, {"orders": (StartTrainer(5, fresh=True),)}, "would not know of"),
        (LOST, {"orders": (Release(9, final=True),)}, "would not know of"),
        (LOST, {"orders": (Wait("ROLLOUT[0]#2", 99.0),)}, "waits for nothing, or too long"),
        (LOST, {"orders": (StartMembers("ROLLOUT", ((0, 1),)),)}, "a number that is not the worker's"),
        (GROUP_LOST, {"orders": (StartMembers("ACTOR", ((0, 2),)),)}, "starts a part of a group"),
        (LOST, {"orders": (StartMembers("ROLLOUT", ((0, 2),), excluded=("a",)),)}, "a node that is excluded"),
        (LOST, {"change": ended_by_limit}, "given up before its limit"),
        (lost("ROLLOUT", 0, kind=CauseKind.HUNG), {}, "of a process that works"),
    ],
)
def test_referee_of_broken_step_raises(event, changes, words):
    with pytest.raises(Violation, match=words):
        judge(event, **changes)


def test_referee_of_other_replayed_state_raises():
    run, referee = Run(*OPEN), Referee(lambda process_id, number: True)
    referee.last = run.state
    referee.replayed(run.state)
    with pytest.raises(Violation, match="replays to another state"):
        referee.replayed(Run(*OPEN, LOST).state)


def test_referee_of_replayed_pending_step_is_silent():
    run, referee = Run(*OPEN), Referee(lambda process_id, number: True)
    referee.last = run.state
    steps = referee.expect(run.state, [LOST, lost("ROLLOUT", 1)], 99.0)
    referee.pending = [steps]
    referee.replayed(steps[0][2])
    assert (referee.last, referee.pending) == (steps[0][2], [])
