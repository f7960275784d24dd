# SPDX-License-Identifier: Apache-2.0
"""A training job that is killed at every call, and ends as if nothing had happened."""

import logging
import shutil
import tempfile
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import InvocationError, WorkloadDied
from tests.support.disks import damage_byte
from tests.support.durable_toys import CLASSES, Flaky, Policy, Stage, Training, both, kill, kill_trainer

OPENED = 8
"""Number of the first question when ``steps()`` is entered: losses are recovered from there on."""

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
    """Compare the ends of two runs to the bit; workers that died and were not needed again are left out."""
    assert (outcome["end"], outcome["logs"]) == (expected["end"], expected["logs"])
    assert all(expected["members"][name] == state for name, state in outcome["members"].items())


each_half = pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
"""Every other call."""


def kill_at(folder, number, fault, when="before", **options):
    """The stage of a run with one fault, and its outcome."""
    stage = Stage(folder, **options)
    return stage, stage.run({(number, when): fault})


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
@pytest.mark.parametrize("fault", FAULTS)
@each_half
def test_death_at_any_call_leaves_the_end_the_same(folder, half, fault, when):
    reference, expected = undisturbed(folder, steps=2)
    for number in range(OPENED + half, len(reference.port.calls), 2):
        _, outcome = kill_at(folder / str(number), number, FAULTS[fault], when, steps=2)
        same(outcome, expected)


@pytest.mark.parametrize("distance", [1, 2, 5, *(pytest.param(calls, marks=pytest.mark.slow) for calls in (3, 8))])
@each_half
def test_second_death_during_a_recovery_changes_nothing(folder, half, distance):
    reference, expected = undisturbed(folder, steps=2)
    for number in range(OPENED + half, len(reference.port.calls), 2):
        stage = Stage(folder / str(number), steps=2)
        faults = {(number, "before"): kill("ACTOR", 1), (number + distance, "before"): kill("ACTOR", 0)}
        same(stage.run(faults), expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_death_of_the_trainer_repeats_no_call(folder, when):
    reference, _ = undisturbed(folder, steps=2)
    for number in range(OPENED, len(reference.port.calls)):
        stage, _ = kill_at(folder / str(number), number, kill_trainer, when, steps=2)
        assert stage.executed() == reference.executed()
        assert len(stage.attempts) == 2


@pytest.mark.parametrize("victim", [("ROLLOUT", 1), ("REWARD", 0)])
def test_death_of_a_stateless_member_costs_its_own_calls(folder, victim):
    reference, _ = undisturbed(folder, steps=2)
    for number in range(12, len(reference.port.calls)):  # from the first call of step 1 on
        stage, _ = kill_at(folder / str(number), number, kill(*victim), steps=2)
        before, after = reference.executed(), stage.executed()
        limits = before.pop(victim)
        assert all(count <= limits[method] for method, count in after.pop(victim).items())
        assert after == before


def test_death_of_a_rank_costs_the_step_of_its_group_only(folder):
    reference, _ = undisturbed(folder, steps=3)
    stage, _ = kill_at(folder / "job", reference.calls_of("ACTOR", "update", 1)[2], kill("ACTOR", 1), steps=3)
    before, after = reference.executed(), stage.executed()
    assert [after["ACTOR", rank]["update"] for rank in (0, 1)] == [1, 1]  # the last step's, of the new processes
    for member in (("ROLLOUT", 0), ("ROLLOUT", 1), ("REWARD", 0), ("REWARD", 1)):
        assert after[member] == before[member]
    assert len(stage.attempts) == 1


def test_trainer_and_members_know_why_they_run_again(folder):
    restarts = []

    class Curious(Training):
        def body(self, step):
            restarts.append((step, self.restart_info.count, self.restart_info.reason, self.restart_info.step))
            super().body(step)

    stage, _ = kill_at(folder / "job", 27, both(kill("ROLLOUT", 1), kill_trainer), trainer=Curious, steps=3)
    assert restarts == [(1, 0, "", 0), (2, 0, "", 0), (2, 1, "killed", 1), (3, 1, "killed", 1)]
    assert stage.port.members["ROLLOUT"][1].host.workload.restart_info.count == 1
    assert stage.progress == [1, 2, 3]


@pytest.mark.parametrize(
    ("file", "lost", "message"),
    [
        ("ACTOR-0", kill_trainer, "is not used"),
        ("trainer", kill_trainer, "is not used"),
        ("manifest", kill_trainer, "is not used"),
        ("ACTOR-0", kill("ACTOR", 1), "repeating step 4 from the last commit: InvocationError: ACTOR[0].restore"),
    ],
    ids=["actor", "trainer", "manifest", "read by a replacement"],
)
def test_damaged_newest_commit_costs_one_more_step(folder, file, lost, message, caplog):
    reference, expected = undisturbed(folder, steps=4, every=100)

    def strike(port):
        damage_byte(next(max((stage.path / "memory").glob("step-*")).glob(f"{file}*")), at=-100)
        lost(port)

    stage = Stage(folder / "job", steps=4, every=100)
    with caplog.at_level(logging.WARNING, "dlrover"):
        same(stage.run({(reference.calls_of("ACTOR", "update", 0)[3], "before"): strike}), expected)
    assert message in caplog.text
    assert stage.restarted_after() == [0, 2]  # 3 was committed


def test_different_replay_goes_back_to_the_last_commit(folder, caplog):
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
    """Fails the updates of these numbers, having half made them."""

    failures = []
    error = Flaky

    def update(self, rollouts, rewards):
        if self.rank == 0 and self.failures and self.updates == self.failures[0]:
            self.weights += self.failures.pop(0)
            raise self.error("for now")
        return super().update(rollouts, rewards)


def flaky_stage(folder, failures, error=Flaky):
    FlakyPolicy.failures, FlakyPolicy.error = failures, error
    return Stage(folder / "flaky", classes={**CLASSES, "ACTOR": FlakyPolicy})


def test_retryable_error_is_retried_from_the_last_commit(folder, caplog):
    _, expected = undisturbed(folder)
    stage = flaky_stage(folder, failures=[1, 1, 1])
    with caplog.at_level(logging.WARNING, "dlrover"):
        same(stage.run(), expected)
    assert caplog.text.count("repeating step 2 from the last commit: InvocationError: ACTOR[0].update") == 3
    assert [trainer.restart_info.count for trainer in stage.attempts] == [0, 1, 2, 3]
    assert all("Flaky: for now" in trainer.restart_info.reason for trainer in stage.attempts[1:])


@pytest.mark.parametrize(("failures", "error", "attempts"), [([1] * 4, Flaky, 4), ([1], ValueError, 1)])
def test_error_is_raised_if_a_retry_does_not_help_or_is_unfit(folder, failures, error, attempts):
    stage = flaky_stage(folder, failures, error)
    with pytest.raises(InvocationError, match=f"{error.__name__}: for now"):
        stage.run()
    assert len(stage.attempts) == attempts


def test_committed_step_forgives_earlier_retries(folder):
    _, expected = undisturbed(folder)
    stage = flaky_stage(folder, failures=[1, 1, 2, 2])
    same(stage.run(), expected)
    assert len(stage.attempts) == 5


def test_trainer_without_steps_commits_nothing_and_fails_at_once(folder):
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


def test_second_loop_continues_where_the_first_has_ended(folder):
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
        same(kill_at(folder / str(number), number, kill_trainer, trainer=TwoPhases)[1], expected)


@pytest.mark.parametrize("last", [3, 4])
def test_step_left_by_break_is_committed_and_runs_once(folder, last):
    steps = []

    class Breaks(Training):
        def fit(self):
            for step in self.steps(9):
                steps.append(step)
                self.body(step)
                if step >= 3:
                    break
            for step in self.steps(4 if last == 4 else 0):
                steps.append(step)
                self.body(step)
            self.config["end"].append((self.RG_ACTOR.publish().result()[0], self.state["mean"]))

    stage, expected = undisturbed(folder, Breaks)
    assert steps == list(range(1, last + 1))
    assert stage.progress[-1] == last
    commits = sorted(path.name for path in (folder / "undisturbed").rglob("step-*"))
    assert commits[-1].startswith(f"step-{last:08}")
    for number in range(10, 50, 3):
        same(kill_at(folder / str(number), number, kill_trainer, trainer=Breaks)[1], expected)
