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
from dlrover.python.rl.trainer import port as ports
from dlrover.python.rl.trainer.port import FORGET, RESTORE, WHERE, Outcome, Ref, Renewed, RoleTraits, Standing
from dlrover.python.rl.trainer.steps import Attempt, Steps, dump_state
from dlrover.python.rl.trainer.trainer import BaseTrainer, StepReport, TrainerLink, run_trainer
from dlrover.python.rl.trainer.workload import BaseWorkload, undecorated
from tests.support.role_group_toys import StageTrainer


class Loop(StageTrainer):
    @property
    def total_steps(self):
        return self.missing_config.steps


HANDLES = {"actor": ["a0", "a1"], "ROLLOUT": ["r0"], "judge": ["j0"]}


def new_trainer(**link):
    trainer = Loop(HANDLES, dict.fromkeys(HANDLES, BaseWorkload), {"lr": 1})
    if link:
        trainer.bind(TrainerLink(port=None, job="job", **{"report": print, "job_dir": "runs/job", **link}))
    return trainer


def test_trainer_has_the_properties_of_the_guide():
    trainer = new_trainer()
    assert (trainer.actors, trainer.rollouts) == (["a0", "a1"], ["r0"])
    assert trainer.references == trainer.rewards == trainer.critics == []
    assert trainer.config == {"lr": 1}
    assert trainer.actor_handles == {"ACTOR": ["a0", "a1"], "ROLLOUT": ["r0"], "JUDGE": ["j0"]}
    assert all(isinstance(role, RLRoleType) for role in trainer.actor_handles)
    assert trainer.get_role_groups() == ["RG_ACTOR", "RG_ROLLOUT", "RG_JUDGE"]
    trainer = new_trainer(resources={}, job_dir="runs/j")
    assert [len(getattr(trainer, name)) for name in trainer.get_role_groups()] == [2, 1, 1]
    assert trainer.job_dir == "runs/j"
    with pytest.raises(AttributeError, match="set its keys"):
        trainer.state = {"seen": []}
    with pytest.raises(TypeError, match="abstract.*fit.*init"):
        BaseTrainer({}, {}, {})


@pytest.mark.parametrize(("name", "hint"), [("RG_CRITIC", "known"), ("RG_ROLOUT", "did you mean 'RG_ROLLOUT'")])
def test_missing_role_group_is_refused(name, hint):
    with pytest.raises(UnknownMethod, match=f"the job has no role group '{name}'; (did you mean|known)") as caught:
        getattr(new_trainer(resources={}), name)
    assert hint in str(caught.value)
    assert not hasattr(new_trainer(resources={}), name)


def test_trainer_before_it_is_bound_says_so():
    trainer = new_trainer()
    with pytest.raises(UnknownMethod, match=r"RG_ACTOR is bound after .* is constructed: use it from init\(\)"):
        _ = trainer.RG_ACTOR
    for use in (lambda: trainer.job_dir, lambda: trainer.log(1, x=1.0), lambda: trainer.get_workload_resource("ACTOR")):
        with pytest.raises(CallError, match=r"not bound yet: use role groups, log and job_dir from init\(\) on"):
            use()


@pytest.mark.parametrize(("name", "missing"), [("total_steps", "missing_config"), ("nothing", "nothing")])
def test_attribute_error_names_the_missing_attribute(name, missing):
    with pytest.raises(AttributeError, match=f"'Loop' object has no attribute '{missing}'"):
        getattr(new_trainer(), name)


def test_get_workload_resource_takes_any_spelling_of_a_role():
    trainer, resource = new_trainer(resources={"ACTOR": {"cpu": 1.0, "gpu": 0.5}}), {"cpu": 1.0, "gpu": 0.5}
    roles = (RLRoleType.ACTOR, "actor", "ROLLOUT")
    assert [trainer.get_workload_resource(role) for role in roles] == [resource, resource, {}]
    for role, message in (("CRITIC", "no role 'CRITIC'"), ("rolout", "no role 'ROLOUT'; did you mean 'ROLLOUT'")):
        with pytest.raises(UnknownMethod, match=message):
            trainer.get_workload_resource(role)


def test_steps_count_from_1_and_reports_carry_the_total():
    reports = []
    trainer = new_trainer(report=reports.append)
    for step in trainer.steps(2):
        trainer.log(step, {"loss": 1}, kl=step)
    assert reports == [StepReport(1, 2, {"loss": 1.0, "kl": 1.0}), StepReport(2, 2, {"loss": 1.0, "kl": 2.0})]
    assert list(trainer.steps(0)) == []
    for number in ("one", -1, None):
        with pytest.raises(CallError, match="the step number first, not"):
            trainer.log(number, a=1)
    for value in ("high", None, [1.0]):
        with pytest.raises(CallError, match=re.escape(f"log() takes numbers, and 'a' is {value!r}")):
            trainer.log(1, a=value)
    trainer.log(np.int64(2), a=1)
    assert len(reports) == 3


def test_raw_handles_are_renewed_with_their_members():
    trainer = new_trainer(resources={})
    trainer._bound_steps().port.renewed(Renewed("ACTOR", {0: 1, 1: 2}, {1: "b1"}))
    assert trainer.actors == trainer.actor_handles["ACTOR"] == ["a0", "b1"]


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3)], ids=["error", "exit"])
def test_run_trainer_reports_the_end_and_raises_its_error(error):
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


def test_undecorated_takes_the_decoration_of_ray_off():
    # ``@ray.remote`` leaves a wrapper around a class derived from the user's.
    derived = type("Derived", (BaseWorkload,), {"__ray_actor_class__": BaseWorkload})
    decorated = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=derived))
    assert undecorated(decorated) is undecorated(BaseWorkload) is BaseWorkload


@dataclass
class Members:
    """Say where they stand, and note their requests; a restored one stands at the commit."""

    standings: dict
    requests: list = field(default_factory=list)

    def submit(self, role, rank, call):
        self.requests.append((call.method, rank))
        if call.method == RESTORE:
            self.standings[rank] = Standing(call.args[0], call.args[0], call.args[0])
        answer = self.standings[rank] if call.method == WHERE else None
        return Ref(self, Outcome(answer), None, role, rank, call.method, 1)

    def wait(self, refs, timeout_s):
        return [ref.token for ref in refs]


@dataclass
class Commits:
    """The commits of one step."""

    step: int
    left: tuple = ()
    run: str = "run1"
    spread = adapts = False

    def newest(self):
        return self.step

    def load(self, step):
        return dump_state({"mean": 0.5}, "run1", self.left)

    def trainers_copy(self, *_):
        return []

    transfers_to = trainers_copy

    def restore_request(self, step):
        return step


class Restarted:
    """A trainer that begins again with workers that are up."""

    epoch = 2
    fresh = False
    restart_info = ports.RestartInfo()

    def incarnations(self):
        return {ProcessId("A", 0): 1, ProcessId("A", 1): 1}

    def began(self, *_):
        pass

    opened = began


def goes_back(standings, together):
    members = Members(standings)
    traits = {"A": RoleTraits(2, stateful=True, together=together)}
    assert Steps(members, Restarted(), Commits(4), traits, Attempt()).open() == 4
    return [(verb, rank) for verb, rank in members.requests if verb in (RESTORE, FORGET)]


def test_ranks_with_collectives_are_restored_together():
    ready, behind = Standing(4, 4, 4), Standing(3, 3, 3)
    assert goes_back({0: ready, 1: behind}, together=True) == [(RESTORE, 0), (RESTORE, 1)]
    assert goes_back({0: ready, 1: behind}, together=False) == [(RESTORE, 1)]
    assert goes_back({0: ready, 1: ready}, together=True) == []


def test_members_forget_answers_together_if_one_is_ahead():
    standings = {0: Standing(4, 6, 7), 1: Standing(4, 4, 5)}
    assert goes_back(standings, together=False) == [(FORGET, 0), (FORGET, 1)]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("run", "begins"), [("run1", []), ("run2", [5])])
def test_loop_left_in_one_run_continues_in_another(fresh, run, begins):
    recovery = Restarted()
    recovery.fresh = fresh
    members = Members(dict.fromkeys((0, 1), Standing(4, 4, 4)))
    traits = {"A": RoleTraits(2, stateful=True)}
    steps = Steps(members, recovery, Commits(4, (0, 4), run), traits, Attempt())
    assert list(steps.run(3)) == []
    assert steps.port.step == steps.counter.step == 5, "what comes now is of no step that is committed"
    assert list(islice(steps.run(9), 1)) == begins
    assert steps.state == {"mean": 0.5}
