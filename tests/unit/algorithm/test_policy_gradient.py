# SPDX-License-Identifier: Apache-2.0
"""The clipped surrogate, GSPO's and CISPO's ratios, the correction of rollouts, KL estimators."""

import math

import pytest
import torch

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.algorithm.cispo import CISPO
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.gspo import GSPO
from dlrover.python.rl.algorithm.losses.policy_gradient import clipped_surrogate, correction_weights, kl_estimate
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.common.errors import DataError


@pytest.mark.feature(118)
@pytest.mark.parametrize(
    ("ratios", "advantages", "high", "losses", "gradient", "clipped"),
    [
        ([1.3, 1.3], [2.0, -2.0], 0.2, [-2.4, 2.6], [0, 2.6], [0.5, 0.0, 0.5]),
        ([0.7, 0.7], [2.0, -2.0], 0.2, [-1.4, 1.6], [-1.4, 0], [0.5, 0.5, 0.0]),
        ([1.3, 1.5], [1.0, 1.0], 0.4, [-1.3, -1.4], [-1.3, 0], [0.5, 0.0, 0.5]),
        ([1.5], [0.0], 0.2, [0], [0], [0, 0, 0]),
    ],
)
def test_clipped_surrogate_by_hand(ratios, advantages, high, losses, gradient, clipped):
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    columns = {"advantage": torch.tensor(advantages), "weight": torch.full_like(logprobs, 1 / len(ratios))}
    columns["old_logprobs"] = torch.zeros_like(logprobs)
    actual, metrics = clipped_surrogate(logprobs, columns, 0.2, high)
    actual.sum().backward()
    assert actual.tolist() == pytest.approx(losses)
    assert logprobs.grad.tolist() == pytest.approx(gradient)
    assert [metrics[f"clip_{part}"].item() for part in ("fraction", "low", "high")] == clipped


def test_clipped_surrogate_names_a_missing_column():
    with pytest.raises(DataError, match="the loss needs the column 'advantage'; did you mean 'advantages'"):
        clipped_surrogate(torch.zeros(1), {"advantages": torch.zeros(1)}, 0.2, 0.2)


@pytest.mark.parametrize("algorithm", [GRPO(), GRPO(entropy_coef=0.1)])
def test_engine_loss_measures_entropy_in_and_out_of_the_loss(algorithm):
    columns = {"advantage": torch.ones(2), "weight": torch.tensor([0.25, 0.75]), "old_logprobs": torch.zeros(2)}
    columns["entropy"] = torch.tensor([2.0, 4.0], requires_grad=True)
    loss = EngineLoss(algorithm, logs_entropy=True)
    value, metrics = loss(torch.zeros(2, requires_grad=True), columns)
    value.backward()
    assert loss.wants_entropy
    assert float(metrics["entropy"]) == 3.5
    assert (columns["entropy"].grad is not None) == (algorithm.entropy_coef > 0)
    assert EngineLoss(algorithm).wants_entropy == (algorithm.entropy_coef > 0)


def loss_of(config, ratios, advantages, units=None, **columns):
    """On tokens of old log-prob -1, weighted alike; ``columns`` as lists."""
    tokens = len(ratios)
    leaf = torch.tensor([math.log(ratio) - 1 for ratio in ratios], dtype=torch.float64, requires_grad=True)
    loss, metrics = config.loss(
        leaf,
        {
            "old_logprobs": torch.full((tokens,), -1.0, dtype=torch.float64),
            "advantage": torch.tensor(advantages, dtype=torch.float64),
            "weight": torch.full((tokens,), 1 / tokens, dtype=torch.float64),
            "unit": torch.tensor(units or list(range(tokens))),
            **{name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
        },
    )
    loss.backward()
    return loss.item(), (leaf.grad * tokens).tolist(), metrics


@pytest.mark.parametrize("config", [GRPO(), GSPO(), CISPO()])
def test_diverged_policy_has_a_finite_loss(config):
    columns = {name: torch.full((2,), value) for name, value in {"old_logprobs": -500.0, "weight": 0.5}.items()}
    logprobs = torch.zeros(2, requires_grad=True)
    loss, metrics = config.loss(logprobs, {**columns, "advantage": torch.tensor([0.0, -1.0]), "unit": torch.arange(2)})
    loss.backward()
    assert all(torch.as_tensor(value).isfinite().all() for value in (loss, logprobs.grad, *metrics.values()))


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    config = CISPO(clip_low=0.2, clip_high=0.2)
    loss, gradient, metrics = loss_of(config, [1.5, 0.5, 1.1], [1.0, 1.0, -2.0])
    logprobs = [math.log(ratio) - 1 for ratio in (1.5, 0.5, 1.1)]
    assert loss == pytest.approx(-(1.2 * logprobs[0] + 0.8 * logprobs[1] - 2.2 * logprobs[2]) / 3)
    assert gradient == pytest.approx([-1.2, -0.8, 2.2])
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 3)


# -- rollouts of another engine ---------------------------------------------------------------------------------------


def factors(kind, differences, low=0.0, high=2.0, level="token", units=None):
    """Correction factors of tokens whose old log-probs are ``differences`` above the rollout's."""
    old = torch.zeros(len(differences), dtype=torch.float64)
    rollout = old - torch.tensor(differences, dtype=torch.float64)
    columns = {"old_logprobs": old, "rollout_logprobs": rollout, "weight": torch.full_like(old, 1 / len(old))}
    columns["unit"] = torch.tensor(units or list(range(len(old))))
    factor, metrics = correction_weights(columns, kind, level, low, high)
    assert not factor.requires_grad
    return factor.tolist(), {name: value.item() for name, value in metrics.items()}


SEQUENCES = {"level": "sequence", "units": [7, 7, 3]}
RATIOS = [math.log(1.5), math.log(4), math.log(0.1), 0.0]


@pytest.mark.feature(119)
@pytest.mark.parametrize(
    ("kind", "differences", "options", "expected", "bounded"),
    [
        ("truncate", [0.0, 0.0], {}, [1, 1], 0),
        ("mask", [0.0, 0.0], {"level": "sequence"}, [1, 1], 0),
        ("truncate", RATIOS, {}, [1.5, 2.0, 0.1, 1], 1 / 4),
        ("mask", RATIOS, {"low": 0.5}, [1.5, 0, 0, 1], 2 / 4),
        ("truncate", [math.log(1.5), math.log(1.2), 0.3], SEQUENCES, [1.8, 1.8, math.exp(0.3)], 0),
        ("truncate", [500.0, 500.0, 0.0], SEQUENCES, [2, 2, 1], 2 / 3),
    ],
)
def test_correction_factors_by_hand(kind, differences, options, expected, bounded):
    weights, metrics = factors(kind, differences, **options)
    assert weights == pytest.approx(expected)
    assert metrics["mismatch_bounded"] == pytest.approx(bounded)


@pytest.mark.feature(119)
@pytest.mark.parametrize(("kind", "factor"), [("truncate", 2.0), ("mask", 0.0)])
def test_correction_bound_is_2_by_default(kind, factor):
    loss, _, _ = loss_of(GRPO(correction=kind), [1.0, 1.0], [1.0, 1.0], rollout_logprobs=[-1 - math.log(1.9), -2.0])
    assert loss == pytest.approx(-(1.9 + factor) / 2)


@pytest.mark.feature(116)
@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065307)])
def test_kl_estimate_by_hand(kind, expected):
    values = kl_estimate(torch.tensor([-1.0, -20.0]), torch.tensor([-1.5, -20.0]), kind)
    assert values.tolist() == pytest.approx([expected, 0], abs=1e-6)


def test_kl_estimate_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown KL estimator 'kl'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "kl")


@pytest.mark.parametrize(
    ("logprob", "value", "slope"),
    [
        (-2.0, 0.718282, -1.718282),
        (-10.5, 13349.23, -13358.73),
        (-11.5, 22015.47, 0.0),
        (-95.0, 22015.47, 0.0),
        (-1e30, 22015.47, 0.0),
    ],
)
def test_k3_of_an_unlikely_token_is_bounded(logprob, value, slope):
    logprobs, reference = torch.tensor([logprob], requires_grad=True), torch.tensor([-1.0])
    penalty = kl_estimate(logprobs, reference, "k3")
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(value, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("where", ["loss", "advantage"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo", "ppo"])
def test_unlikely_token_leaves_loss_and_gradient_small(name, where):
    algorithm = make_algorithm(name, {"kl_coef": 0.001, "kl_in": where, "kl_estimator": "k3"})
    logprobs = torch.tensor([-95.0, -1.0, -1.0], requires_grad=True)
    constants = {"ref_logprobs": -1.0, "advantage": 1.0, "weight": 1 / 3, "unit": 0}
    columns = {name: torch.full((3,), value) for name, value in constants.items()}
    columns["old_logprobs"] = logprobs.detach()
    loss, metrics = algorithm.loss(logprobs, columns)
    loss.backward()
    assert abs(loss.item()) < 1000  # before the bound: infinite
    assert logprobs.grad.abs().max() < 10
    assert metrics["kl"].item() == pytest.approx(22015.47 / 3, rel=1e-4)
