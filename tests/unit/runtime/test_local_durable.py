# SPDX-License-Identifier: Apache-2.0
"""A training job that is killed at every call, and ends as if nothing had happened."""

import logging
import shutil
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import pytest

from dlrover.python.rl.common.errors import CheckpointMissing, InvocationError, StaleCall, WorkloadDied
from dlrover.python.rl.runtime.local import process_environment
from dlrover.python.rl.runtime.member.arguments import CallHeader
from dlrover.python.rl.trainer.trainer import run_trainer
from tests.support.durable_toys import (
    CLASSES,
    Flaky,
    Pipelined,
    Policy,
    Stage,
    Training,
    both,
    kill,
    kill_trainer,
)
from tests.support.queued_port import QueuedPort

OPENED = 8
"""Number of the first question when ``steps()`` is entered: losses are recovered from there on."""

FIRST = 12
"""Number of the first call of step 1."""

FAULTS = {
    "an actor": kill("ACTOR", 1),
    "the other actor": kill("ACTOR", 0),
    "a rollout": kill("ROLLOUT", 1),
    "a reward": kill("REWARD", 0),
    "a rollout and an actor": both(kill("ROLLOUT", 0), kill("ACTOR", 1)),
    "both rewards": both(kill("REWARD", 0), kill("REWARD", 1)),
    "the trainer": kill_trainer,
    "the trainer and a rollout": both(kill("ROLLOUT", 0), kill_trainer),
    "the trainer and an actor": both(kill("ACTOR", 0), kill_trainer),
}


@pytest.fixture
def folder():
    """A folder in memory: hundreds of jobs sync their files."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="dlrover-rl-test-", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path)


def undisturbed(folder, trainer=Training, **options):
    stage = Stage(folder / "undisturbed", trainer, **options)
    return stage, stage.run()


def same(outcome, expected):
    """Whether two runs ended alike to the bit; workers that died and were not needed again are left out."""
    assert (outcome["end"], outcome["logs"]) == (expected["end"], expected["logs"])
    assert all(expected["members"][name] == state for name, state in outcome["members"].items())


each_half = pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
"""Every other call."""


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
@pytest.mark.parametrize("fault", FAULTS)
@each_half
def test_whatever_dies_at_whichever_call_the_end_is_the_same(folder, half, fault, when):
    reference, expected = undisturbed(folder, steps=2)
    for number in range(OPENED + half, len(reference.port.calls), 2):
        stage = Stage(folder / str(number), steps=2)
        same(stage.run({(number, when): FAULTS[fault]}), expected)


@pytest.mark.parametrize("distance", [1, 2, 5, *(pytest.param(calls, marks=pytest.mark.slow) for calls in (3, 8))])
@each_half
def test_a_second_death_during_the_recovery_of_the_first_changes_nothing(folder, half, distance):
    reference, expected = undisturbed(folder, steps=2)
    for number in range(OPENED + half, len(reference.port.calls), 2):
        stage = Stage(folder / str(number), steps=2)
        faults = {(number, "before"): kill("ACTOR", 1), (number + distance, "before"): kill("ACTOR", 0)}
        same(stage.run(faults), expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_trainers_death_repeats_no_call_that_was_made(folder, when):
    reference, _ = undisturbed(folder, steps=2)
    for number in range(OPENED, len(reference.port.calls)):
        stage = Stage(folder / str(number), steps=2)
        stage.run({(number, when): kill_trainer})
        assert stage.executed() == reference.executed()
        assert len(stage.attempts) == 2


@pytest.mark.parametrize("victim", [("ROLLOUT", 1), ("REWARD", 0)])
def test_the_death_of_a_stateless_member_costs_its_own_calls_of_that_step(folder, victim):
    reference, _ = undisturbed(folder, steps=2)
    for number in range(FIRST, len(reference.port.calls)):
        stage = Stage(folder / str(number), steps=2)
        stage.run({(number, "before"): kill(*victim)})
        others = {member: counts for member, counts in stage.executed().items() if member != victim}
        assert others == {member: counts for member, counts in reference.executed().items() if member != victim}
        calls = stage.executed()[victim]
        assert all(count <= reference.executed()[victim][method] for method, count in calls.items())


def test_the_death_of_one_rank_costs_its_group_that_step_and_nobody_else_anything(folder):
    reference, _ = undisturbed(folder, steps=3)
    number = reference.port.calls.index(("ACTOR", 1, "update"), 32)
    stage = Stage(folder / "job", steps=3)
    stage.run({(number, "before"): kill("ACTOR", 1)})
    before, after = reference.executed(), stage.executed()
    assert [after["ACTOR", rank]["update"] for rank in (0, 1)] == [1, 1]  # the last step's, of the new processes
    for member in (("ROLLOUT", 0), ("ROLLOUT", 1), ("REWARD", 0), ("REWARD", 1)):
        assert after[member] == before[member]
    assert len(stage.attempts) == 1


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 25))])
@pytest.mark.parametrize("trainer", [Training, Pipelined])
def test_deaths_of_chance_while_calls_wait_in_queues_change_nothing(folder, trainer, seed):
    _, expected = undisturbed(folder, trainer)
    stage = Stage(folder / "job", trainer, port=lambda members: QueuedPort(members, random=Random(seed)))
    stage.on_opened = lambda: vars(stage.port).update(death_rate=0.04, trainer_death_rate=0.005)
    same(stage.run(deaths=100), expected)


def test_the_trainer_is_told_why_it_runs_again_and_members_too(folder):
    told = []

    class Curious(Training):
        def body(self, step):
            told.append((step, self.restart_info.count, self.restart_info.reason, self.restart_info.step))
            super().body(step)

    stage = Stage(folder / "job", Curious, steps=3)
    stage.run({(27, "before"): both(kill("ROLLOUT", 1), kill_trainer)})
    assert told == [(1, 0, "", 0), (2, 0, "", 0), (2, 1, "killed", 1), (3, 1, "killed", 1)]
    assert stage.port.members["ROLLOUT"][1].host.workload.restart_info.count == 1
    assert stage.progress == [1, 2, 3]


def damage(path, byte=-100):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(bytes(content))


def newest(stage):
    return max(path for path in (stage.path / "memory").iterdir() if path.name.startswith("step-"))


@pytest.mark.parametrize("file", ["ACTOR-0", "trainer", "manifest"])
def test_a_damaged_newest_commit_costs_one_more_step(folder, file, caplog):
    reference, expected = undisturbed(folder, steps=4, every=100)

    def strike(port):
        damage(next(newest(stage).glob(f"{file}*")))
        kill_trainer(port)

    stage = Stage(folder / "job", steps=4, every=100)
    number = reference.port.calls.index(("ACTOR", 0, "update"), 42)
    with caplog.at_level(logging.WARNING, "dlrover"):
        same(stage.run({(number, "before"): strike}), expected)
    assert "is not used" in caplog.text
    assert [trainer.restart_info.step for trainer in stage.attempts] == [0, 2]  # 3 was committed


def test_a_commit_that_a_replacement_cannot_read_is_given_up_and_said(folder, caplog):
    reference, expected = undisturbed(folder, steps=4, every=100)

    def strike(port):
        damage(next(newest(stage).glob("ACTOR-0*")))
        port.kill("ACTOR", 1)

    stage = Stage(folder / "job", steps=4, every=100)
    number = reference.port.calls.index(("ACTOR", 0, "update"), 42)
    with caplog.at_level(logging.WARNING, "dlrover"):
        same(stage.run({(number, "before"): strike}), expected)
    assert "repeating step 4 from the last commit: InvocationError: ACTOR[0].restore" in caplog.text
    assert [trainer.restart_info.step for trainer in stage.attempts] == [0, 2]


def test_when_no_commit_is_left_that_is_an_error_never_a_new_beginning(folder):
    def strike(port):
        for path in (stage.path / "memory").glob("step-*"):
            damage(next(path.glob("trainer*")))
        kill_trainer(port)

    stage = Stage(folder / "job", steps=4, every=100)
    with pytest.raises(CheckpointMissing, match="no commit of run run1 is left: step-0000000"):
        stage.run({(40, "before"): strike})


def test_a_copy_in_the_jobs_directory_outlives_the_nodes_memory(folder):
    reference, expected = undisturbed(folder, steps=5, every=2)
    stage = Stage(folder / "job", steps=5, every=2)

    def strike(port):
        shutil.rmtree(stage.path / "memory")
        for role, rank in (("ACTOR", 0), ("ACTOR", 1)):
            port.kill(role, rank)
        kill_trainer(port)

    number = reference.port.calls.index(("ACTOR", 1, "update"), 62)
    same(stage.run({(number, "before"): strike}), expected)
    assert stage.attempts[1].restart_info.step == 2


def test_a_replay_that_differs_goes_back_to_the_last_commit_and_says_so(folder, caplog):
    class Moody(Training):
        def body(self, step):
            if self.restart_info.count == 1:
                self.RG_REWARD.init_judge(0.5)  # where the first one called something else
            super().body(step)

    _, expected = undisturbed(folder)
    stage = Stage(folder / "job", Moody)
    with caplog.at_level(logging.WARNING, "dlrover"):
        outcome = stage.run({(27, "before"): kill_trainer})
    assert "repeating step 2 from the last commit: ReplayDiverged: " in caplog.text
    same(outcome, expected)
    assert len(stage.attempts) == 3


class FlakyPolicy(Policy):
    """Fails some updates, having half made them."""

    failures = []
    error = Flaky

    def update(self, rollouts, rewards):
        if self.rank == 0 and self.updates == 1 and self.failures:
            self.weights += self.failures.pop()
            raise self.error("for now")
        return super().update(rollouts, rewards)


def flaky_stage(folder, failures, error=Flaky):
    classes = {**Stage(folder / "none").classes, "ACTOR": FlakyPolicy}
    FlakyPolicy.failures, FlakyPolicy.error = list(range(failures)), error
    return Stage(folder / "flaky", classes=classes)


def test_an_error_that_says_so_is_tried_again_from_the_last_commit(folder, caplog):
    _, expected = undisturbed(folder)
    stage = flaky_stage(folder, failures=3)
    with caplog.at_level(logging.WARNING, "dlrover"):
        same(stage.run(), expected)
    assert caplog.text.count("repeating step 2 from the last commit: InvocationError: ACTOR[0].update") == 3
    assert [trainer.restart_info.count for trainer in stage.attempts] == [0, 1, 2, 3]
    assert all("Flaky: for now" in trainer.restart_info.reason for trainer in stage.attempts[1:])


def test_it_is_raised_when_trying_again_does_not_help(folder):
    stage = flaky_stage(folder, failures=4)
    with pytest.raises(InvocationError, match="Flaky: for now"):
        stage.run()
    assert len(stage.attempts) == 4


class FlakyLater(FlakyPolicy):
    def update(self, rollouts, rewards):
        if self.rank == 0 and self.failures and self.updates == self.failures[0]:
            self.failures.pop(0)
            raise Flaky("for now")
        return Policy.update(self, rollouts, rewards)


def test_a_committed_step_forgives_the_tries_of_those_before(folder):
    _, expected = undisturbed(folder)
    FlakyLater.failures = [1, 1, 2, 2]  # numbers of updates
    stage = Stage(folder / "flaky", classes={**CLASSES, "ACTOR": FlakyLater})
    same(stage.run(), expected)
    assert len(stage.attempts) == 5


def test_a_users_error_is_raised_at_once(folder):
    stage = flaky_stage(folder, failures=1, error=ValueError)
    with pytest.raises(InvocationError, match="ValueError: for now"):
        stage.run()
    assert len(stage.attempts) == 1


def test_an_error_that_nobody_waited_for_is_raised_at_the_commit(folder):
    class Careless(Training):
        def body(self, step):
            self.RG_REWARD.score.options(blocking=False)(None)

    with pytest.raises(InvocationError, match=r"REWARD\[0\].score"):
        Stage(folder / "job", Careless).run()


def test_before_steps_a_loss_is_raised(folder):
    for number in range(4):
        with pytest.raises(WorkloadDied, match=r"ROLLOUT\[1\].init_model: the worker was killed"):
            Stage(folder / str(number)).run({(number, "before"): kill("ROLLOUT", 1)})


def test_a_trainer_without_steps_runs_as_it_always_did(folder):
    class Plain(Training):
        def fit(self):
            for step in (1, 2):
                self.body(step)

    stage = Stage(folder / "job", Plain)
    stage.config["end"].append(None)
    logs = stage.run()["logs"]
    assert logs == {step: logs[step] for step in (1, 2)}
    assert not list((folder / "job" / "memory").glob("step-*"))
    with pytest.raises(WorkloadDied):
        Stage(folder / "other", Plain).run({(20, "before"): kill("ACTOR", 1)})


def test_arguments_that_the_trainer_changes_later_are_replayed_as_they_were(folder):
    class Reusing(Training):
        def body(self, step):
            scale = np.full(2, 0.1 * step)
            self.RG_REWARD.init_judge(scale)
            scale[:] = -1.0
            super().body(step)

    _, expected = undisturbed(folder, Reusing)
    stage = Stage(folder / "job", Reusing)
    same(stage.run({(30, "before"): kill("REWARD", 1)}), expected)


def test_a_second_loop_goes_on_where_the_first_has_ended(folder):
    steps = []

    class TwoPhases(Training):
        def fit(self):
            for total in (2, 4):
                for step in self.steps(total):
                    steps.append(step)
                    self.body(step)
            self.config["end"].append((self.RG_ACTOR.publish().result()[0], self.state["mean"]))

    _, expected = undisturbed(folder, TwoPhases)
    assert steps == [1, 2, 3, 4]
    for number in range(10, 50, 3):
        same(Stage(folder / str(number), TwoPhases).run({(number, "before"): kill_trainer}), expected)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_step_that_is_left_by_break_is_committed_and_runs_once(folder, goes_on):
    steps = []

    class Breaks(Training):
        def fit(self):
            for step in self.steps(9):
                steps.append(step)
                self.body(step)
                if step >= 3:
                    break
            for step in self.steps(4 if goes_on else 0):
                steps.append(step)
                self.body(step)
            self.config["end"].append((self.RG_ACTOR.publish().result()[0], self.state["mean"]))

    stage, expected = undisturbed(folder, Breaks)
    last = 4 if goes_on else 3
    assert steps == list(range(1, last + 1))
    assert stage.progress[-1] == last
    commits = sorted(path.name for path in (folder / "undisturbed").rglob("step-*"))
    assert commits[-1].startswith(f"step-{last:08}")
    for number in range(10, 50, 3):
        same(Stage(folder / str(number), Breaks).run({(number, "before"): kill_trainer}), expected)


def test_a_trainer_that_is_replaced_sends_nothing_more_out_of_order(folder):
    """Only its actor knows of the new trainer; what the rollouts would do without the actor's answer is kept there."""
    stage = Stage(folder / "job", trainer=Pipelined, steps=3)
    reference = Stage(folder / "reference", trainer=Pipelined, steps=3)
    reference.run()
    publish = [number for number, call in enumerate(reference.port.calls) if call[::2] == ("ACTOR", "publish")]

    def replaced(port):
        for member in port.members["ACTOR"]:
            member.host.invoke(CallHeader((-1, -1), "!where", epoch=2), lambda: ([], {}))

    stage.port.faults = {(publish[2], "before"): replaced}
    with process_environment(stage.memory("trainer")), pytest.raises(StaleCall):
        run_trainer(stage.make, stage.link())
    done = [member.host.executed["generate"] for member in stage.port.members["ROLLOUT"]]
    assert done == [1, 1]
