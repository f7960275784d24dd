# SPDX-License-Identifier: Apache-2.0
"""Trainers on samples learn what they are for, on a model of 35 thousand parameters."""

import numpy as np
import pytest

from dlrover.python.rl.algorithm.losses.policy_gradient import PolicyGradient
from dlrover.python.rl.algorithm.registry import ALGORITHMS
from tests.support.policy_jobs import finished, policy_job, reverse_kl, write_inputs, write_teacher

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 2)
COLUMNS_OF_THE_ACTOR = {"action_mask", "old_logprobs", "rollout_logprobs"}
FAMILY = sorted(
    name
    for name in ALGORITHMS.builtin
    if issubclass(schema := ALGORITHMS.load(name), PolicyGradient) and schema().needs.all <= COLUMNS_OF_THE_ACTOR
)
"""The algorithms that need neither a critic nor a teacher."""
CRITIC = {"optimizer": {"lr": 3e-3}}


def gain(rows, name="reward/mean"):
    """The mean of the last five steps over that of the first five."""
    values = [row[name] for row in rows]
    return np.mean(values[-5:]) / np.mean(values[:5])


@pytest.mark.feature(127)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAMILY)
def test_each_of_the_family_doubles_the_reward(tmp_path, name, seed):
    roles = ("reference",) if name == "deepseek_grpo" else ()
    _, rows = finished(policy_job(tmp_path, "grpo", roles=roles, steps=60, seed=seed, algorithm={"name": name}))
    assert gain(rows) >= 2.0


@pytest.mark.feature(127)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["ppo", "openai_ppo"])
def test_ppo_doubles_the_reward(tmp_path, name, seed):
    roles = ("reference",) if name == "openai_ppo" else ()
    job = policy_job(tmp_path, "ppo", roles=roles, steps=60, seed=seed, algorithm={"name": name}, critic=CRITIC)
    _, rows = finished(job)
    assert gain(rows) >= 2.0
    assert rows[-1]["critic/value"] == pytest.approx(rows[-1]["reward/mean"], abs=0.2)


@pytest.mark.feature(127)
def test_several_updates_and_epochs_learn_sooner_from_as_many_samples(tmp_path):
    config = {"steps": 20, "critic": CRITIC, "algorithm": {"correction": "truncate"}}
    _, often = finished(policy_job(tmp_path, "ppo", out="often", updates_per_step=2, epochs=2, **config))
    _, once = finished(policy_job(tmp_path, "ppo", out="once", **config))
    assert often[-1]["reward/mean"] > once[-1]["reward/mean"]


@pytest.mark.feature(117)
@pytest.mark.parametrize("place", ["loss", "reward", "advantage"])
def test_a_kl_penalty_keeps_the_policy_near_the_reference(tmp_path, place):
    """At the end of training, whatever the reward has pulled it to."""
    ends = []
    for coefficient in (1e-6, 0.5):
        algorithm = {"name": "grpo", "kl_coef": coefficient, "kl_in": place, "normalize": "none"}
        job = policy_job(tmp_path, "grpo", out=str(coefficient), roles=["reference"], steps=50, algorithm=algorithm)
        out, _ = finished(job)
        ends.append(reverse_kl(out / "model", tmp_path / "model"))
    assert ends[1] < 0.5 * ends[0]


@pytest.mark.feature(124)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["distillation", "vocabulary_distillation"])
def test_distillation_lowers_the_reverse_kl_over_the_vocabulary(tmp_path, name, seed):
    write_inputs(tmp_path)
    teacher = write_teacher(tmp_path)
    config = {"steps": 40, "seed": seed, "top": 64, "optimizer": {"lr": 1e-2}, "algorithm": {"name": name}}
    out, _ = finished(policy_job(tmp_path, "distill", teachers={"teacher": {"model": teacher}}, **config))
    assert reverse_kl(out / "model", teacher) < 0.9 * reverse_kl(tmp_path / "model", teacher)


@pytest.mark.feature(124)
@pytest.mark.parametrize("name", ["distillation", "vocabulary_distillation"])
def test_a_teacher_like_the_student_teaches_nothing(tmp_path, name):
    write_inputs(tmp_path)
    teachers = {"teacher": {"model": str(tmp_path / "model")}}
    _, (row,) = finished(policy_job(tmp_path, "distill", steps=1, algorithm={"name": name}, teachers=teachers))
    assert row["loss"] == pytest.approx(0.0, abs=1e-6)
    assert row["grad_norm"] == pytest.approx(0.0, abs=1e-6)


def test_several_teachers_each_count_by_their_weight(tmp_path):
    write_inputs(tmp_path)
    first, second = write_teacher(tmp_path), write_teacher(tmp_path, "second", seed=5)
    ends = []
    for weights in ((1.0, 20.0), (20.0, 1.0)):
        teachers = {
            "teacher": {"model": first, "weight": weights[0]},
            "coder": {"model": second, "weight": weights[1]},
        }
        config = {"steps": 40, "top": 64, "optimizer": {"lr": 1e-2}, "teachers": teachers}
        algorithm = {"name": "vocabulary_distillation"}
        job = policy_job(tmp_path, "distill", out=str(weights), roles=["coder"], algorithm=algorithm, **config)
        out, _ = finished(job)
        ends.append([reverse_kl(out / "model", teacher) for teacher in (first, second)])
    assert ends[1][0] < ends[0][0]
    assert ends[0][1] < ends[1][1]
