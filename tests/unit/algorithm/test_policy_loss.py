# SPDX-License-Identifier: Apache-2.0
"""The clipped surrogate."""

import math

import pytest
import torch

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.policy_gradient import clipped_surrogate
from dlrover.python.rl.common.errors import DataError


def surrogate(ratios, advantages, low=0.2, high=0.2):
    logprobs = torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)
    columns = {
        "advantage": torch.tensor(advantages, dtype=torch.float64),
        "weight": torch.full((len(ratios),), 1 / len(ratios), dtype=torch.float64),
        "old_logprobs": torch.zeros(len(ratios), dtype=torch.float64),
    }
    losses, metrics = clipped_surrogate(logprobs, columns, low, high)
    losses.sum().backward()
    return losses.tolist(), logprobs.grad.tolist(), metrics


@pytest.mark.feature(118)
def test_ratio_above_the_clip():
    losses, gradient, metrics = surrogate([1.3, 1.3], [2.0, -2.0])
    assert losses == pytest.approx([-2.4, 2.6])
    assert gradient == pytest.approx([0, 2.6])
    assert [metrics[f"clip_{part}"].item() for part in ("fraction", "low", "high")] == [0.5, 0.0, 0.5]


@pytest.mark.feature(118)
def test_ratio_below_the_clip():
    losses, gradient, metrics = surrogate([0.7, 0.7], [2.0, -2.0])
    assert losses == pytest.approx([-1.4, 1.6])
    assert gradient == pytest.approx([-1.4, 0])
    assert [metrics[f"clip_{part}"].item() for part in ("fraction", "low", "high")] == [0.5, 0.5, 0.0]


def test_the_two_clips_are_separate():
    losses, gradient, _ = surrogate([1.3, 1.5], [1.0, 1.0], low=0.2, high=0.4)
    assert losses == pytest.approx([-1.3, -1.4])
    assert gradient == pytest.approx([-1.3, 0])


def test_an_advantage_of_zero_is_not_clipped():
    assert surrogate([1.5], [0.0])[2]["clip_fraction"].item() == 0


def test_metrics_by_hand():
    _, _, metrics = surrogate([1.3, 0.7], [1.0, 1.0])
    assert metrics["ratio"].item() == pytest.approx(1.0)
    assert metrics["approx_kl"].item() == pytest.approx((0.3 - math.log(1.3) - 0.3 - math.log(0.7)) / 2)
    assert metrics["weight"].item() == pytest.approx(1)


def test_a_missing_column_is_named():
    with pytest.raises(DataError, match="the loss needs the column 'advantage'; did you mean 'advantages'"):
        clipped_surrogate(torch.zeros(1), {"advantages": torch.zeros(1)}, 0.2, 0.2)


@pytest.mark.parametrize("algorithm", [GRPO(), GRPO(entropy_coef=0.1)])
def test_the_entropy_is_measured_whether_or_not_it_is_in_the_loss(algorithm):
    columns = {
        "advantage": torch.ones(2),
        "weight": torch.tensor([0.25, 0.75]),
        "old_logprobs": torch.zeros(2),
        "entropy": torch.tensor([2.0, 4.0], requires_grad=True),
    }
    loss = EngineLoss(algorithm, logs_entropy=True)
    value, metrics = loss(torch.zeros(2, requires_grad=True), columns)
    value.backward()
    assert loss.wants_entropy
    assert float(metrics["entropy"]) == 3.5
    assert (columns["entropy"].grad is not None) == (algorithm.entropy_coef > 0)
    assert EngineLoss(algorithm).wants_entropy == (algorithm.entropy_coef > 0)
