# SPDX-License-Identifier: Apache-2.0
"""The GRPO recipe through deaths of workers and of the trainer: the end is that of an undisturbed run, to the bit."""

import json
import random

import numpy as np
import pytest

from dlrover.python.rl.common.errors import DataError, NonFiniteUpdate, WeightsLost
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.workloads import ActorWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.trainer.workload import trainer_invocation
from tests.chaos.job import tiny_job
from tests.support.recipe_stage import Stage, both, flip_a_bit, kill, kill_trainer

STEPS = 3
TIMES = ("time/", "speed/", "memory/")
JUDGES = []


class Judge(RewardWorkload):
    """A killed process would take its verifiers with it; here the test does."""

    def init_verifier(self, reward, columns):
        JUDGES.append(self)
        super().init_verifier(reward, columns)


class Poisoned(ActorWorkload):
    """Some of its updates are given a NaN."""

    updates = 0
    poisoned = ()

    def update(self, rollouts, rows, *more):
        type(self).updates += 1
        if self.updates in self.poisoned:
            rows = rows.with_columns(advantage=np.full_like(rows.dense("advantage"), np.nan))
        return super().update(rollouts, rows, *more)


class Torn(ActorWorkload):
    """Once, a bit of the weights flips on the way."""

    published_times = 0

    @trainer_invocation(blocking=False)
    def publish_weights(self):
        type(self).published_times += 1
        ticket = super().publish_weights()
        if self.published_times == 2:
            flip_a_bit(self, ticket, "model.norm.weight")
        return ticket


@pytest.fixture(autouse=True)
def _no_verifier_is_left():
    yield
    while JUDGES:
        JUDGES.pop().close()


def stage(folder, inputs, actor=ActorWorkload, **config):
    roles = {"ACTOR": (actor, 1), "ROLLOUT": (RolloutWorkload, 2), "REWARD": (Judge, 1)}
    small = {"samples_per_prompt": 4, "max_new_tokens": 3, "temperature": 1.0}
    job = tiny_job(inputs, STEPS, rollout=small, prompts_per_step=4, eval_every=2, **config)
    return Stage(folder / "out", GRPOTrainer, roles, job.config)


def end_of(made, faults=None):
    """Run it through the faults; everything that must not depend on them."""
    made.run(faults)
    rows = [json.loads(line) for line in (made.folder / "metrics.jsonl").read_text().splitlines()]
    files = ("samples.jsonl", "held_out.jsonl", "model/model.safetensors")
    skeleton, buffers = state_tree.dump(made.workload("ACTOR").state_dict())
    return {
        "metrics": [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows],
        "state": (skeleton, [bytes(buffer) for buffer in buffers]),
        **{name: (made.folder / name).read_bytes() for name in files},
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, inputs):
    made = stage(tmp_path_factory.mktemp("undisturbed"), inputs)
    end = end_of(made)
    while JUDGES:
        JUDGES.pop().close()
    return end, list(made.port.calls)


def test_an_undisturbed_run_has_every_step_once(undisturbed):
    end, calls = undisturbed
    assert [row["step"] for row in end["metrics"]] == [0, 1, 2, 3]
    assert end["samples.jsonl"].count(b"\n") == STEPS * 16


FAULTS = [kill("ACTOR", 0), kill("ROLLOUT", 0), kill("ROLLOUT", 1), kill("REWARD", 0), kill_trainer]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_whatever_dies_the_end_is_the_same(tmp_path, inputs, undisturbed, seed):
    expected, calls = undisturbed
    first = next(at for at, call in enumerate(calls) if call[2] == "publish_weights")
    draw = random.Random(seed)
    faults = {
        (draw.randrange(first, len(calls)), draw.choice(["before", "after"])): both(
            draw.choice(FAULTS[:4]), draw.choice(FAULTS)
        )
        for _ in range(3)
    }
    end = end_of(stage(tmp_path, inputs), faults)
    for name, value in expected.items():
        assert end[name] == value, f"{name}, faults at {sorted(faults)}"


@pytest.mark.slow
@pytest.mark.feature(64)
def test_prompts_that_were_left_out_stay_so_for_a_trainer_that_takes_over(tmp_path, inputs):
    rows = [{"prompt": f"{number}{'+1' * (number % 2)}=", "answer": "2"} for number in range(16)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "own.jsonl"), "eval_rows": 4, "max_prompt_tokens": 3, "over_long": "drop"}
    whole = stage(tmp_path / "whole", inputs, data=data)
    expected = end_of(whole)
    last = max(at for at, call in enumerate(whole.port.calls) if call[2] == "sample")
    broken = stage(tmp_path / "broken", inputs, data=data)
    assert end_of(broken, {(last, "before"): kill_trainer}) == expected
    assert broken.epoch == 2
    for made in (whole, broken):
        assert json.loads((made.folder / "summary.json").read_text())["dropped_prompts"] == 8
        drawn = (made.folder / "samples.jsonl").read_text().splitlines()
        assert {json.loads(row)["row"] % 2 for row in drawn} == {0}


def test_a_rollout_lost_with_the_actor_asks_for_the_weights_anew(tmp_path, inputs, undisturbed, monkeypatch):
    """Its replacement is given the ticket of an actor that is gone, and whose memory went with it."""
    expected, calls = undisturbed
    lost = []
    receive = PullTransport.receive

    def noted(transport, ticket):
        try:
            return receive(transport, ticket)
        except WeightsLost as error:
            lost.append(str(error))
            raise

    monkeypatch.setattr(PullTransport, "receive", noted)
    drawing = [at for at, call in enumerate(calls) if call[1:] == (1, "generate")]
    fault = both(kill("ACTOR", 0), both(kill("ROLLOUT", 0), kill("ROLLOUT", 1)))
    made = stage(tmp_path, inputs)
    end = end_of(made, {(drawing[1], "before"): fault})
    assert [name for name, value in expected.items() if end[name] != value] == []
    assert lost
    assert all("from ACTOR[0] cannot be fetched" in each for each in lost)
    again = [call[2] for call in made.port.calls].count("publish_weights") - [call[2] for call in calls].count(
        "publish_weights"
    )
    assert again >= 2  # by the new actor for its own replay, and for the rollouts


def test_a_nan_of_the_moment_heals(tmp_path, inputs, undisturbed):
    class Actor(Poisoned):
        poisoned = (2,)

    assert end_of(stage(tmp_path, inputs, Actor)) == undisturbed[0]
    assert Actor.updates == STEPS + 1


def test_weights_that_are_torn_on_the_way_are_sent_again(tmp_path, inputs, undisturbed):
    assert end_of(stage(tmp_path, inputs, Torn)) == undisturbed[0]
    assert Torn.published_times > 2


def test_a_nan_that_stays_ends_the_run_and_names_its_place(tmp_path, inputs):
    class Actor(Poisoned):
        poisoned = range(2, 100)

    with pytest.raises(
        NonFiniteUpdate, match=r"step 2: the loss is nan \(first in: advantage\): .*sample 0 of prompt "
    ):
        end_of(stage(tmp_path, inputs, Actor))
    assert Actor.updates == 1 + 4
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    refused = [json.loads(line) for line in (tmp_path / "out" / "refused.jsonl").read_text().splitlines()]
    assert [row["step"] for row in refused] == [2] * 16


class Away(Judge):
    """It has no opinion of what the first update has led to."""

    def score(self, rollouts):
        judged = super().score(rollouts)
        away = judged.dense("version") > 0
        reward = np.where(away, np.nan, judged.dense("reward"))
        return judged.with_columns(reward=reward, error=["it is away" if lost else None for lost in away.tolist()])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["sample", "score"])
def test_a_trainer_that_is_killed_goes_on_counting_steps_without_a_reward(tmp_path, inputs, when):
    def made(folder):
        roles = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (RolloutWorkload, 1), "REWARD": (Away, 1)}
        small = {"samples_per_prompt": 4, "max_new_tokens": 3}
        reward = {"function": "tests.chaos.graded:graded", "workers": 1, "give_up_after": 3}
        job = tiny_job(inputs, 9, rollout=small, prompts_per_step=4, reward=reward)
        return Stage(folder, GRPOTrainer, roles, job.config)

    undisturbed = made(tmp_path / "undisturbed")
    with pytest.raises(DataError, match="step 4: .* it is away; it was the last of 3 such steps in a row"):
        undisturbed.run()
    at = [at for at, call in enumerate(undisturbed.port.calls) if call[2] == when][-2]
    killed = made(tmp_path / "killed")
    with pytest.raises(DataError, match="step 4: .* the last of 3 such steps"):
        killed.run({(at, "after"): kill_trainer})
    assert killed.epoch == 2
