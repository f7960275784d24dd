# SPDX-License-Identifier: Apache-2.0
"""How a trainer goes back to a commit, over a port that the test plays."""

from dataclasses import dataclass, field
from itertools import islice

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.trainer.port import (
    FORGET,
    RESTORE,
    WHERE,
    Outcome,
    Ref,
    RestartInfo,
    RoleTraits,
    Standing,
)
from dlrover.python.rl.trainer.steps import Attempt, Steps, dump_state


@dataclass
class Members:
    """Say where they stand, and what they were asked; a restored one stands at the commit."""

    standings: dict
    asked: list = field(default_factory=list)

    def submit(self, role, rank, call):
        self.asked.append((call.method, rank))
        if call.method == RESTORE:
            self.standings[rank] = Standing(call.args[0], call.args[0], call.args[0])
        answer = self.standings[rank] if call.method == WHERE else None
        return Ref(self, Outcome(answer), None, role, rank, call.method, 1)

    def wait(self, refs, timeout_s):
        return [ref.token for ref in refs]


@dataclass
class Commits:
    """Of one step."""

    step: int
    left: tuple = ()
    run: str = "run1"
    spread = adapts = False

    def newest(self):
        return self.step

    def load(self, step):
        return dump_state({"mean": 0.5}, "run1", self.left)

    def transfers_to(self, step, members, nodes):
        return []

    def trainers_copy(self, nodes):
        return []

    def restore_request(self, step):
        return step


class Restarted:
    """A trainer that begins again with workers that are up."""

    epoch = 2
    fresh = False
    restart_info = RestartInfo()

    def incarnations(self):
        return {ProcessId("A", 0): 1, ProcessId("A", 1): 1}

    def opened(self):
        pass

    def began(self, step):
        pass


def goes_back(standings, together):
    members = Members(standings)
    traits = {"A": RoleTraits(2, stateful=True, together=together)}
    assert Steps(members, Restarted(), Commits(4), traits, Attempt()).open() == 4
    return [(verb, rank) for verb, rank in members.asked if verb in (RESTORE, FORGET)]


def test_ranks_that_meet_are_restored_together():
    there, behind = Standing(4, 4, 4), Standing(3, 3, 3)
    assert goes_back({0: there, 1: behind}, together=True) == [(RESTORE, 0), (RESTORE, 1)]
    assert goes_back({0: there, 1: behind}, together=False) == [(RESTORE, 1)]
    assert goes_back({0: there, 1: there}, together=True) == []


def test_members_forget_answers_together_if_one_is_ahead():
    assert goes_back({0: Standing(4, 6, 7), 1: Standing(4, 4, 5)}, together=False) == [(FORGET, 0), (FORGET, 1)]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("run", "begins"), [("run1", []), ("run2", [5])])
def test_a_loop_that_was_left_is_over_for_the_run_and_goes_on_in_another(fresh, run, begins):
    recovery = Restarted()
    recovery.fresh = fresh
    members = Members(dict.fromkeys((0, 1), Standing(4, 4, 4)))
    traits = {"A": RoleTraits(2, stateful=True)}
    steps = Steps(members, recovery, Commits(4, (0, 4), run), traits, Attempt())
    assert list(steps.run(3)) == []
    assert steps.port.step == steps.counter.step == 5, "what comes now is of no step that is committed"
    assert list(islice(steps.run(9), 1)) == begins
    assert steps.state == {"mean": 0.5}
