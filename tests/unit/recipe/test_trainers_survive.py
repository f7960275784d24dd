# SPDX-License-Identifier: Apache-2.0
"""Recipes through deaths of workers and of the trainer: they end like an undisturbed run, to the bit."""

import random

import numpy as np
import pytest

from dlrover.python.rl.common.errors import NonFiniteUpdate, WeightsLost
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.recipe.distill import DistillationTrainer
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.ppo import PPOTrainer
from dlrover.python.rl.recipe.workloads import (
    ActorWorkload,
    CriticWorkload,
    ReferenceWorkload,
    RewardWorkload,
    RolloutWorkload,
    TeacherWorkload,
)
from dlrover.python.rl.trainer.workload import trainer_invocation
from tests.support import example_jobs
from tests.support.durable_toys import both, kill, kill_trainer
from tests.support.policy_jobs import policy_config, write_inputs, write_teacher
from tests.support.recipe_stage import Stage, flip_a_bit
from tests.support.run_files import read_json, read_lines, untimed, write_rows

STEPS = 3
COLLECTING = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (RolloutWorkload, 2), "REWARD": (RewardWorkload, 1)}
RECIPES = {
    "grpo": (GRPOTrainer, {}),
    "grpo, corrected": (GRPOTrainer, {}),
    "ppo": (PPOTrainer, {"CRITIC": (CriticWorkload, 1), "REFERENCE": (ReferenceWorkload, 1)}),
    "distill": (DistillationTrainer, {"TEACHER": (TeacherWorkload, 2), "CODER": (TeacherWorkload, 1)}),
}


def stage(folder, inputs, recipe="grpo", roles=COLLECTING, **changes):
    """A job of PPO has a critic, a reference, corrections, several updates and a warm-up; distillation two teachers."""
    config = policy_config(inputs) | {"rollout": {"samples_per_prompt": 2, "max_new_tokens": 3}}
    if recipe.startswith("grpo"):
        config["algorithm"] = {"name": "grpo", "correction": "truncate" if "corrected" in recipe else "none"}
        config |= {"eval_every": 2, "rollout": {"samples_per_prompt": 4, "max_new_tokens": 3}}
    elif recipe == "ppo":
        config["algorithm"] = {"name": "openai_ppo", "correction": "truncate"}
        config |= {"critic": {"optimizer": {"lr": 3e-3}, "warmup_steps": 1}, "updates_per_step": 3, "epochs": 2}
    else:
        config |= {"algorithm": {"name": "vocabulary_distillation"}, "top": 8}
        config["teachers"] = {name: {"model": str(inputs / name)} for name in ("teacher", "coder")}
        config["teachers"]["teacher"]["weight"] = 2.0
    trainer, own_roles = RECIPES[recipe]
    return Stage(folder / "out", trainer, {**roles, **own_roles}, config | changes)


def state_of(job, role):
    state = job.workload(role).state_dict()
    # Other recipes' roles share a generator, in one process, and draw nothing from it.
    skeleton, buffers = state_tree.dump(state if job.trainer is GRPOTrainer else state["engine"])
    return skeleton, [bytes(buffer) for buffer in buffers]


def end_of(job, faults=None):
    """Run it through the faults; everything that must not depend on them."""
    job.run(faults)
    states = {role: state_of(job, role) for role in ("ACTOR", "CRITIC") if role in job.roles}
    files = {name: (job.folder / name).read_bytes() for name in ("samples.jsonl", "held_out.jsonl")}
    return states | files | models_of(job.folder) | {"metrics": untimed(job.folder)}


def models_of(folder):
    files = (file for name in ("model", "best", "steps") for file in sorted((folder / name).rglob("*.safetensors")))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def changed_parts(end, expected):
    return [name for name, value in expected.items() if end[name] != value]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    write_teacher(folder)
    write_teacher(folder, "coder", seed=1)
    return folder


@pytest.fixture(scope="module", params=RECIPES)
def undisturbed(request, tmp_path_factory, inputs):
    job = stage(tmp_path_factory.mktemp("undisturbed"), inputs, request.param)
    return request.param, end_of(job), list(job.port.calls)


of_grpo = pytest.mark.parametrize("undisturbed", ["grpo"], indirect=True)


def test_undisturbed_run_trains_in_every_step(undisturbed, inputs):
    recipe, end, _ = undisturbed
    _, first, *later = end["metrics"]
    assert [row["step"] for row in end["metrics"]] == [0, 1, 2, 3]
    if recipe == "ppo":
        assert "loss" not in first, "the critic alone is warmed up"
        assert {"loss", "critic/loss", "policy/mismatch_kl"} <= set(later[0])
    elif recipe == "distill":
        assert min(row["policy/reverse_kl"] for row in (first, *later)) > 0
    else:
        assert end["samples.jsonl"].count(b"\n") == STEPS * 16
    assert end["model/model.safetensors"] != (inputs / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_policy_recipe_with_random_deaths_ends_the_same(tmp_path, inputs, undisturbed, seed):
    recipe, expected, calls = undisturbed
    job = stage(tmp_path, inputs, recipe)
    members = [kill(role, rank) for role, (_, size) in job.roles.items() for rank in range(size)]
    first = next(at for at, call in enumerate(calls) if call[2] == "publish_weights")
    draw = random.Random(seed)
    faults = {
        (draw.randrange(first, len(calls)), draw.choice(["before", "after"])): both(
            draw.choice(members), draw.choice([*members, kill_trainer])
        )
        for _ in range(3)
    }
    assert changed_parts(end_of(job, faults), expected) == [], f"faults at {sorted(faults)}"


@pytest.mark.feature(97)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_refilled_steps_with_random_deaths_end_the_same(tmp_path, inputs, seed):
    """A step asks for a number of groups that depends on earlier steps, which a replaced trainer has not seen."""
    changes = {"rollout": {"samples_per_prompt": 2, "max_new_tokens": 3, "dynamic_filtering": "refill"}, "steps": 4}
    changes["reward"] = {"function": "tests.support.policy_rewards:odd", "workers": 1, "timeout_s": 60.0}
    whole = stage(tmp_path / "whole", inputs, **changes)
    expected, calls, draw = end_of(whole), list(whole.port.calls), random.Random(seed)
    assert all(row["groups/filtered"] for row in expected["metrics"][1:])
    assert any("groups/surplus" in row for row in expected["metrics"])
    samplings = [at for at, call in enumerate(calls) if call[2] == "sample"]
    faults = {
        (draw.choice(samplings[1:]), "after"): kill_trainer,
        (draw.choice(samplings), "before"): kill("ROLLOUT", draw.randrange(2)),
        (draw.randrange(samplings[0], len(calls)), "after"): kill("ACTOR", 0),
    }
    end = end_of(stage(tmp_path, inputs, **changes), faults)
    assert changed_parts(end, expected) == [], f"faults at {sorted(faults)}"


@pytest.mark.parametrize("undisturbed", ["ppo"], indirect=True)
def test_critic_killed_after_an_update_comes_back(tmp_path, inputs, undisturbed):
    _, expected, calls = undisturbed
    (*_, last) = (at for at, call in enumerate(calls) if call[0] == "CRITIC" and call[2] == "update")
    end = end_of(stage(tmp_path, inputs, "ppo"), {(last, "after"): kill("CRITIC", 0)})
    assert changed_parts(end, expected) == []


@of_grpo
def test_rollout_lost_with_the_actor_asks_for_weights_again(tmp_path, inputs, undisturbed, monkeypatch):
    """The replacement gets the ticket of an actor that is gone, and whose memory went with it."""
    _, expected, calls = undisturbed
    lost, receive = [], PullTransport.receive

    def noted(transport, ticket):
        try:
            return receive(transport, ticket)
        except WeightsLost as error:
            lost.append(str(error))
            raise

    monkeypatch.setattr(PullTransport, "receive", noted)
    drawing = [at for at, call in enumerate(calls) if call[1:] == (1, "generate")]
    fault = both(kill("ACTOR", 0), both(kill("ROLLOUT", 0), kill("ROLLOUT", 1)))
    job = stage(tmp_path, inputs)
    assert changed_parts(end_of(job, {(drawing[1], "before"): fault}), expected) == []
    assert lost and all("from ACTOR[0] cannot be fetched" in message for message in lost)
    before, after = ([call[2] for call in run].count("publish_weights") for run in (calls, job.port.calls))
    assert after - before >= 2  # by the new actor for its own replay, and for the rollouts


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


def with_actor(actor):
    return {**COLLECTING, "ACTOR": (actor, 1)}


@of_grpo
def test_update_with_a_nan_once_is_repeated(tmp_path, inputs, undisturbed):
    class Actor(Poisoned):
        poisoned = (2,)

    assert end_of(stage(tmp_path, inputs, roles=with_actor(Actor))) == undisturbed[1]
    assert Actor.updates == STEPS + 1


@of_grpo
def test_torn_weights_are_sent_again(tmp_path, inputs, undisturbed):
    assert end_of(stage(tmp_path, inputs, roles=with_actor(Torn))) == undisturbed[1]
    assert Torn.published_times > 2


def test_update_with_a_nan_each_time_ends_the_run(tmp_path, inputs):
    class Actor(Poisoned):
        poisoned = range(2, 100)

    message = r"step 2: the loss is nan \(first in: advantage\): .*sample 0 of prompt "
    with pytest.raises(NonFiniteUpdate, match=message):
        stage(tmp_path, inputs, roles=with_actor(Actor)).run()
    assert Actor.updates == 1 + 4
    assert [row["step"] for row in read_lines(tmp_path / "out/metrics.jsonl")] == [0, 1]
    assert [row["step"] for row in read_lines(tmp_path / "out/refused.jsonl")] == [2] * 16
    assert [row["step"] for row in read_lines(tmp_path / "out/samples.jsonl")] == [1] * 16 + [2] * 16


# -- recipes on examples -----------------------------------------------------------------------------------------------


def end_on_examples(folder, kind, config, faults=None):
    """Run it through the faults; the metrics, the models and the summary at its end, and its calls."""
    job = example_jobs.stage(kind, folder, config)
    job.run(faults)
    assert not job.port.faults, "not all of them have happened"
    summary = {name: value for name, value in read_json(folder / "summary.json").items() if "model" not in name}
    return untimed(folder), models_of(folder), summary, job.port.calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_example_recipe_with_deaths_ends_the_same(tmp_path, kind):
    write_tiny_model(tmp_path / "model", hidden=32, layers=1, max_positions=32)
    sides = {"response": 1} if kind == "sft" else {"chosen": 1, "rejected": 0}
    rows = [{"prompt": f"{n}+1=", **{side: str(n + more) for side, more in sides.items()}} for n in range(10)]
    config = {"model": str(tmp_path / "model"), "data": {"train": write_rows(tmp_path / "rows.jsonl", rows)}}
    config |= {"batch_size": 4, "epochs": 2.0, "eval_every": 2, "optimizer": {"lr": 1e-3, "warmup_steps": 3}}
    config |= {"engine": {"threads": 1}, "keep": {"best": "eval/loss", "save_every": 2}}
    *undisturbed, calls = end_on_examples(tmp_path / "undisturbed", kind, config)
    assert [row["step"] for row in undisturbed[0]] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in undisturbed[0] if "eval/loss" in row] == [2, 4, 5]
    assert [name.split("/")[-2] for name in undisturbed[1]] == ["model", "best", "step-2", "step-4"]
    methods = ("train", "measure", "save")
    at = {name: [number for number, call in enumerate(calls) if call[2] == name] for name in methods}
    other = kill("REFERENCE", 0) if kind == "dpo" else kill("ACTOR", 0)
    faults = {
        (at["train"][1], "after"): kill("ACTOR", 0),
        (at["train"][3], "before"): kill_trainer,
        (at["train"][3] + 2, "after"): kill_trainer,
        (at["measure"][1] + 9, "before"): both(other, kill_trainer),
        (at["save"][-1] + 12, "before"): kill_trainer,
    }
    *disturbed, _ = end_on_examples(tmp_path / "disturbed", kind, config, faults)
    assert disturbed == undisturbed
