# SPDX-License-Identifier: Apache-2.0
"""PPO and distillation through deaths of workers and of the trainer: the end is that of an undisturbed run, to the bit,
the critic's too."""

import json
import random

import pytest

from dlrover.python.rl.data import state_tree
from dlrover.python.rl.recipe.distill import DistillationTrainer
from dlrover.python.rl.recipe.ppo import PPOTrainer
from dlrover.python.rl.recipe.workloads import (
    ActorWorkload,
    CriticWorkload,
    ReferenceWorkload,
    RewardWorkload,
    RolloutWorkload,
    TeacherWorkload,
)
from tests.support.policy_jobs import write_inputs, write_teacher
from tests.support.recipe_stage import Stage, both, kill, kill_trainer

STEPS = 3
TIMES = ("time/", "speed/", "memory/")
TRAINED = {"ppo": ("ACTOR", "CRITIC"), "distill": ("ACTOR",)}
JUDGES = []


class Judge(RewardWorkload):
    """A killed process would take its verifiers with it; here the test does."""

    def init_verifier(self, reward, columns):
        JUDGES.append(self)
        super().init_verifier(reward, columns)


def end_verifiers():
    while JUDGES:
        JUDGES.pop().close()


@pytest.fixture(autouse=True)
def _no_verifier_is_left():
    yield
    end_verifiers()


ROLES = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (RolloutWorkload, 2), "REWARD": (Judge, 1)}


def stage(folder, inputs, recipe):
    """PPO with all it has: values, a reference in the reward, log-probs computed anew, several updates, a warm-up. Or
    two teachers that tell their likely ids."""
    config = {
        "model": str(inputs / "model"),
        "data": {"train": str(inputs / "problems.jsonl"), "eval_rows": 4},
        "steps": STEPS,
        "prompts_per_step": 4,
        "optimizer": {"lr": 3e-3},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 3},
        "reward": {"function": "tests.support.policy_rewards:low", "workers": 1, "timeout_s": 60.0},
        "engine": {"threads": 1},
    }
    if recipe == "ppo":
        config["algorithm"] = {"name": "openai_ppo", "correction": "truncate"}
        config |= {"critic": {"optimizer": {"lr": 3e-3}, "warmup_steps": 1}, "updates_per_step": 3, "epochs": 2}
        roles = {**ROLES, "CRITIC": (CriticWorkload, 1), "REFERENCE": (ReferenceWorkload, 1)}
        return Stage(folder / "out", PPOTrainer, roles, config)
    config |= {"algorithm": {"name": "vocabulary_distillation"}, "top": 8}
    config["teachers"] = {
        "teacher": {"model": str(inputs / "teacher"), "weight": 2.0},
        "coder": {"model": str(inputs / "coder")},
    }
    roles = {**ROLES, "TEACHER": (TeacherWorkload, 2), "CODER": (TeacherWorkload, 1)}
    return Stage(folder / "out", DistillationTrainer, roles, config)


def end_of(made, recipe, faults=None):
    """Run it through the faults; everything that must not depend on them."""
    made.run(faults)
    rows = [json.loads(line) for line in (made.folder / "metrics.jsonl").read_text().splitlines()]
    end = {name: (made.folder / name).read_bytes() for name in ("samples.jsonl", "model/model.safetensors")}
    for role in TRAINED[recipe]:
        # Not the random numbers: in one process the roles share a generator, and nothing of theirs is drawn from it.
        skeleton, buffers = state_tree.dump(made.workload(role).state_dict()["engine"])
        end[role] = (skeleton, [bytes(buffer) for buffer in buffers])
    return end | {"metrics": [{name: row[name] for name in row if not name.startswith(TIMES)} for row in rows]}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    write_teacher(folder)
    write_teacher(folder, "coder", seed=1)
    return folder


@pytest.fixture(scope="module", params=["ppo", "distill"])
def undisturbed(request, tmp_path_factory, inputs):
    made = stage(tmp_path_factory.mktemp("undisturbed"), inputs, request.param)
    end = end_of(made, request.param)
    end_verifiers()
    return request.param, end, list(made.port.calls)


def test_what_is_compared_has_moved(undisturbed, inputs):
    recipe, end, _ = undisturbed
    _, first, *later = end["metrics"]
    assert [row["step"] for row in end["metrics"]] == [0, 1, 2, 3]
    if recipe == "ppo":
        assert "loss" not in first, "the critic alone is warmed up"
        assert {"loss", "critic/loss", "policy/mismatch_kl"} <= set(later[0])
    else:
        assert min(row["policy/reverse_kl"] for row in (first, *later)) > 0
    assert end["model/model.safetensors"] != (inputs / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_whatever_dies_the_end_is_the_same(tmp_path, inputs, undisturbed, seed):
    recipe, expected, calls = undisturbed
    made = stage(tmp_path, inputs, recipe)
    members = [kill(role, rank) for role, (_, size) in made.roles.items() for rank in range(size)]
    first = next(at for at, call in enumerate(calls) if call[2] == "publish_weights")
    draw = random.Random(seed)
    faults = {
        (draw.randrange(first, len(calls)), draw.choice(["before", "after"])): both(
            draw.choice(members), draw.choice([*members, kill_trainer])
        )
        for _ in range(3)
    }
    end = end_of(made, recipe, faults)
    assert [name for name, value in expected.items() if end[name] != value] == [], f"faults at {sorted(faults)}"


@pytest.mark.parametrize("undisturbed", ["ppo"], indirect=True)
@pytest.mark.parametrize("role", ["CRITIC", pytest.param("ACTOR", marks=pytest.mark.slow)])
def test_a_critic_that_dies_after_its_update_or_after_the_actors_comes_back(tmp_path, inputs, undisturbed, role):
    recipe, expected, calls = undisturbed
    (*_, last) = (at for at, call in enumerate(calls) if call[0] == role and call[2] == "update")
    end = end_of(stage(tmp_path, inputs, recipe), recipe, {(last, "after"): kill("CRITIC", 0)})
    assert [name for name, value in expected.items() if end[name] != value] == []
