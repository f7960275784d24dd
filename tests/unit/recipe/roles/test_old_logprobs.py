# SPDX-License-Identifier: Apache-2.0
"""Old log-probs of an update: from the rollouts, from a forward pass before it, or from the loss's own."""

import math

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.cispo import CISPO
from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.distillation import Distillation
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.gspo import GSPO
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.updates import UpdatePlan
from tests.support.plain_engine import TEMPERATURE, plain_model, write_model
from tests.support.rollout_member import actor


class CountingTrainEngine(Fsdp2TrainEngine):
    """Counts its passes without gradient."""

    evaluations = 0

    def evaluate(self, *args, **kwargs):
        self.evaluations += 1
        return super().evaluate(*args, **kwargs)


ENGINE = EngineConfig(threads=1, train=f"{__name__}:CountingTrainEngine", max_tokens_per_microbatch=24)
GRADIENT = OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=None)  # a step subtracts the gradient
ONCE = UpdatePlan(TEMPERATURE)
LENGTHS = [(3, 9), (2, 5), (4, 12), (5, 5), (1, 14), (6, 3)]

TRUNCATE, MASK = {"correction": "truncate"}, {"correction": "mask", "correction_low": 0.6, "correction_high": 1.7}
SEQUENCE = {"correction_level": "sequence"}
CORRECTIONS = {
    "none": {},
    "truncate": TRUNCATE,
    "mask": MASK,
    "truncate, sequences": TRUNCATE | SEQUENCE,
    "mask, sequences": MASK | SEQUENCE,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "T", vocab_size=259))


def plain_logprobs(model, tokens, mask):
    """Log-probs ``[actions]`` of one row."""
    table = torch.log_softmax(model(torch.tensor(tokens)[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
    return table[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])][torch.tensor(mask[1:])]


@pytest.fixture(scope="module")
def step(model):
    """The rollouts of a step, whose engine computes other log-probs, and the algorithm's columns."""
    random, plain = np.random.default_rng(0), plain_model(model)
    tokens = [random.integers(0, 256, prompt + actions) for prompt, actions in LENGTHS]
    masks = [np.arange(prompt + actions) >= prompt for prompt, actions in LENGTHS]
    rows, logprobs = Ragged.from_rows(tokens), []
    for row, mask in zip(tokens, masks, strict=True):
        values = np.zeros(len(row), dtype=np.float32)
        with torch.no_grad():
            values[mask] = plain_logprobs(plain, row, mask).numpy()
        logprobs.append(values + mask * random.normal(0, 0.5, len(row)).astype(np.float32))
    rollouts = {"tokens": rows, "action_mask": Ragged.from_rows(masks), "logprobs": Ragged.from_rows(logprobs)}
    advantage = np.where(np.arange(len(LENGTHS)) % 2, 1.0, -0.7).astype(np.float32)
    columns = {"advantage": advantage, "weight": np.full(len(LENGTHS), 1 / 48, dtype=np.float32)}
    for name in ("ref_logprobs", "teacher_logprobs"):
        noise = random.normal(0, 0.3, len(rows.values)).astype(np.float32)
        columns[name] = rows.like(rollouts["logprobs"].values + noise)
    return Batch(rollouts), Batch(columns)


def make_actor(model, algorithm):
    return actor(model, ENGINE, GRADIENT, algorithm)


def weights_of(workload):
    return {name: tensor.detach().clone() for name, tensor in workload._engine.named_weights()}


def take_step(model, algorithm, step, plan=ONCE, **columns):
    """Return the result of the last update, the change of each weight, and the number of passes before the loss."""
    workload, (rollouts, rows) = make_actor(model, algorithm), step
    before = weights_of(workload)
    *_, result = workload.update(rollouts, rows.with_columns(**columns), plan)
    moved = {name: before[name] - tensor for name, tensor in weights_of(workload).items()}
    return result, moved, workload._engine.evaluations


def old_logprobs_of(model, step):
    """Compute the column in a pass before the update, for an actor that then needs none."""
    return make_actor(model, GRPO(**TRUNCATE))._old_logprobs(step[0], TEMPERATURE)


def slow_factor(algorithm, log_ratios, at):
    if algorithm.correction == "none":
        return 1.0
    ratio = math.exp(sum(log_ratios) if algorithm.correction_level == "sequence" else log_ratios[at])
    if algorithm.correction == "truncate":
        return min(ratio, 2.0)
    return ratio if algorithm.correction_low <= ratio <= algorithm.correction_high else 0.0


def slow_update(model, algorithm, step):
    """Return GRPO's loss and gradient, a token at a time, with the old log-probs from a pass before."""
    rollouts, rows = step
    names = ("tokens", "action_mask", "logprobs")
    columns = [*(rollouts.ragged(name) for name in names), rows.dense("advantage"), rows.dense("weight")]
    loss = torch.zeros(())
    for tokens, mask, logprobs, advantage, weight in zip(*columns, strict=True):
        rollout = logprobs[mask].tolist()
        with torch.no_grad():
            old = rollout if algorithm.correction == "none" else plain_logprobs(model, tokens, mask).tolist()
        log_ratios = [before - sampled for before, sampled in zip(old, rollout, strict=True)]
        for at, now in enumerate(plain_logprobs(model, tokens, mask)):
            ratio = (now - old[at]).exp()
            objective = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
            loss = loss - weight * slow_factor(algorithm, log_ratios, at) * objective
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for name, change in actual.items():
        torch.testing.assert_close(
            change, expected[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.feature(119)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_update_equals_a_slow_one_with_a_pass_before(model, step, name):
    algorithm = GRPO(**CORRECTIONS[name])
    loss, gradient = slow_update(plain_model(model), algorithm, step)
    result, moved, evaluations = take_step(model, algorithm, step)
    assert evaluations == (1 if "sequences" in name else 0)
    assert result.loss == pytest.approx(loss, abs=1e-6)
    assert_same_weights(moved, gradient)


ALGORITHMS = {
    "KL and entropy in the loss": GRPO(**TRUNCATE, kl_coef=0.1, entropy_coef=0.05),
    "KL in the advantage": GRPO(**MASK, kl_coef=0.1, kl_in="advantage", kl_estimator="k1"),
    "cispo": CISPO(**TRUNCATE),
    "dapo": DAPO(**MASK, dual_clip=3.0),
    "distillation": Distillation(**TRUNCATE),
    "ppo": PPO(**MASK),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_update_and_metrics_are_the_same_without_the_pass_before(model, step, name):
    algorithm, old = ALGORITHMS[name], old_logprobs_of(model, step)
    result, moved, evaluations = take_step(model, algorithm, step)
    expected, changes, _ = take_step(model, algorithm, step, old_logprobs=old)
    assert evaluations == 0
    assert result.loss == pytest.approx(expected.loss, abs=1e-6)
    assert result.metrics == pytest.approx(expected.metrics, abs=1e-6)
    assert {"mismatch_kl", "mismatch_bounded", "entropy", "ratio", "approx_kl"} <= result.metrics.keys()
    assert result.metrics["mismatch_kl"] > 0.05
    assert_same_weights(moved, changes)


@pytest.mark.parametrize(
    ("algorithm", "plan", "evaluations"),
    [
        (GRPO(**TRUNCATE), UpdatePlan(TEMPERATURE, updates=2), 1),
        (GRPO(**TRUNCATE), UpdatePlan(TEMPERATURE, epochs=2), 1),
        (GRPO(), UpdatePlan(TEMPERATURE, epochs=2), 0),
        (GSPO(), ONCE, 1),
        (GSPO(**TRUNCATE), ONCE, 1),
    ],
)
def test_later_updates_and_whole_sequences_need_a_pass_before(model, step, algorithm, plan, evaluations):
    numbers = np.arange(len(LENGTHS)) % plan.updates
    result, _, counted = take_step(model, algorithm, step, plan, update=numbers)
    assert counted == evaluations
    assert (abs(result.metrics["ratio"] / result.metrics["weight"] - 1) > 1e-3) == (plan is not ONCE)


def test_old_logprobs_of_the_annotation_are_those_of_the_loss(model, step):
    old = step[0].ragged("logprobs")
    algorithm = GRPO(**TRUNCATE, kl_coef=0.1, kl_in="reward")
    result, _, evaluations = take_step(model, algorithm, step, old_logprobs=old)
    assert evaluations == 0
    assert result.metrics["mismatch_kl"] == 0
    assert result.metrics["approx_kl"] > 0.05
