# SPDX-License-Identifier: Apache-2.0
"""``BaseTrainer``: the guide's properties, its steps, and its way back to a commit."""

import re
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dlrover.python.rl.common.errors import CallError, UnknownMethod
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.trainer.port import (
    FORGET,
    RESTORE,
    WHERE,
    Outcome,
    Ref,
    Renewed,
    RestartInfo,
    RoleTraits,
    Standing,
)
from dlrover.python.rl.trainer.steps import Attempt, Steps, dump_state
from dlrover.python.rl.trainer.trainer import BaseTrainer, StepReport, TrainerLink, run_trainer
from dlrover.python.rl.trainer.workload import BaseWorkload, undecorated


class Work(BaseWorkload):
    def go(self):
        return 1


class Loop(BaseTrainer):
    @property
    def total_steps(self):
        return self.missing_config.steps

    def init(self):
        pass

    def fit(self):
        pass


HANDLES = {"actor": ["a0", "a1"], "ROLLOUT": ["r0"], "judge": ["j0"]}


def made(**link):
    trainer = Loop(HANDLES, dict.fromkeys(HANDLES, Work), {"lr": 1})
    if link:
        trainer.bind(TrainerLink(port=None, job="job", **{"report": print, "job_dir": "runs/job", **link}))
    return trainer


def test_a_trainer_needs_init_and_fit():
    with pytest.raises(TypeError, match="abstract.*fit.*init"):
        BaseTrainer({}, {}, {})


def test_the_guides_properties():
    trainer = made()
    assert (trainer.actors, trainer.rollouts) == (["a0", "a1"], ["r0"])
    assert trainer.references == trainer.rewards == trainer.critics == []
    assert trainer.config == {"lr": 1}
    assert trainer.actor_handles == {"ACTOR": ["a0", "a1"], "ROLLOUT": ["r0"], "JUDGE": ["j0"]}
    assert all(isinstance(role, RLRoleType) for role in trainer.actor_handles)
    assert trainer.get_role_groups() == ["RG_ACTOR", "RG_ROLLOUT", "RG_JUDGE"]


def test_the_state_is_set_key_by_key():
    with pytest.raises(AttributeError, match="set its keys"):
        made().state = {"seen": []}


def test_role_groups_are_bound_for_the_roles_present_the_users_own_included():
    trainer = made(resources={})
    assert [len(getattr(trainer, name)) for name in trainer.get_role_groups()] == [2, 1, 1]


@pytest.mark.parametrize("name", ["RG_CRITIC", "RG_JUDGES", "RG_actor"])
def test_a_role_group_that_is_not_there_is_said(name):
    with pytest.raises(UnknownMethod, match=f"the job has no role group '{name}'; (did you mean|known)"):
        getattr(made(resources={}), name)
    assert not hasattr(made(resources={}), name)


def test_the_nearest_role_group_is_named():
    with pytest.raises(UnknownMethod, match="did you mean 'RG_ROLLOUT'"):
        _ = made(resources={}).RG_ROLOUT


def test_before_it_is_bound_the_reason_is_said():
    trainer = made()
    with pytest.raises(
        UnknownMethod, match=r"RG_ACTOR is bound after the trainer is constructed: use it from init\(\)"
    ):
        _ = trainer.RG_ACTOR
    for use in (
        lambda: trainer.job_dir,
        lambda: trainer.log(1, {"x": 1.0}),
        lambda: trainer.get_workload_resource("ACTOR"),
    ):
        with pytest.raises(CallError, match=r"not bound yet: use role groups, log and job_dir from init\(\) on"):
            use()


def test_a_failing_property_of_the_user_says_what_is_missing_inside():
    with pytest.raises(AttributeError, match="'Loop' object has no attribute 'missing_config'"):
        _ = made().total_steps
    with pytest.raises(AttributeError, match="'Loop' object has no attribute 'nothing'"):
        _ = made().nothing


def test_the_resources_of_a_role():
    trainer = made(resources={"ACTOR": {"cpu": 1.0, "gpu": 0.5}})
    assert trainer.get_workload_resource(RLRoleType.ACTOR) == {"cpu": 1.0, "gpu": 0.5}
    assert trainer.get_workload_resource("actor") == {"cpu": 1.0, "gpu": 0.5}
    assert trainer.get_workload_resource("ROLLOUT") == {}
    with pytest.raises(UnknownMethod, match="no role 'CRITIC'"):
        trainer.get_workload_resource("CRITIC")
    with pytest.raises(UnknownMethod, match="no role 'ROLOUT'; did you mean 'ROLLOUT'"):
        trainer.get_workload_resource("rolout")


def test_steps_count_from_1_and_reports_carry_the_total():
    reports = []
    trainer = made(report=reports.append)
    for step in trainer.steps(2):
        trainer.log(step, {"loss": 1}, kl=step)
    assert reports == [
        StepReport(1, 2, {"loss": 1.0, "kl": 1.0}),
        StepReport(2, 2, {"loss": 1.0, "kl": 2.0}),
    ]
    assert list(trainer.steps(0)) == []
    for number in ("one", -1, None):
        with pytest.raises(CallError, match="the number of the step first, not"):
            trainer.log(number, a=1)
    for value in ("high", None, [1.0]):
        with pytest.raises(CallError, match=re.escape(f"log() takes numbers, and 'a' is {value!r}")):
            trainer.log(1, a=value)
    trainer.log(np.int64(2), a=1)
    assert len(reports) == 3


def test_the_job_directory_is_the_links():
    assert made(job_dir="runs/j").job_dir == "runs/j"


def test_raw_handles_are_those_of_new_members():
    trainer = made(resources={})
    trainer._bound_steps().port.renewed(Renewed("ACTOR", {0: 1, 1: 2}, {1: "b1"}))
    assert trainer.actors == trainer.actor_handles["ACTOR"] == ["a0", "b1"]


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3)], ids=["error", "exit"])
def test_run_trainer_tells_the_end_and_raises_its_own_error(error):
    ends = []

    class Ending(Loop):
        def fit(self):
            raise error

        def on_end(self, outcome):
            ends.append(outcome)
            raise RuntimeError("of on_end")

    with pytest.raises(type(error)) as caught:
        run_trainer(lambda: Ending({}, {}, {}), TrainerLink(None, print, "job", Path("runs")))
    assert caught.value is error and ends == ["failed"]


def test_a_rays_decoration_is_taken_off_and_a_plain_class_is_left():
    # What ``@ray.remote`` leaves behind: a wrapper around a class derived from the user's.
    derived = type("Derived", (Work,), {"__ray_actor_class__": Work})
    decorated = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=derived))
    assert undecorated(decorated) is Work
    assert undecorated(Work) is Work


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
