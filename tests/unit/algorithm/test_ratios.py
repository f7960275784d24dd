# SPDX-License-Identifier: Apache-2.0
"""Other ratios than PPO's: GSPO's of sequences, CISPO's weights, dual clip, and the correction of rollouts."""

import math

import pytest
import torch

from dlrover.python.rl.algorithm.cispo import CISPO
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.gspo import GSPO
from dlrover.python.rl.algorithm.losses.policy_gradient import correction_weights


def loss_of(config, ratios, advantages, units=None, **columns):
    """On tokens of old log-prob -1, weighted alike; ``columns`` as lists."""
    tokens = len(ratios)
    leaf = torch.tensor([math.log(ratio) - 1 for ratio in ratios], dtype=torch.float64, requires_grad=True)
    made = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    loss, metrics = config.loss(
        leaf,
        {
            "old_logprobs": torch.full((tokens,), -1.0, dtype=torch.float64),
            "advantage": torch.tensor(advantages, dtype=torch.float64),
            "weight": torch.full((tokens,), 1 / tokens, dtype=torch.float64),
            "unit": torch.tensor(units or list(range(tokens))),
            **made,
        },
    )
    loss.backward()
    return loss.item(), (leaf.grad * tokens).tolist(), metrics


def test_gspo_has_one_ratio_for_a_sequence_its_geometric_mean():
    config = GSPO(clip_low=0.5, clip_high=0.5)
    loss, gradient, metrics = loss_of(config, [1.44, 1.0, 0.81], [1.0, 1.0, 2.0], units=[4, 4, 2])
    assert loss == pytest.approx(-(1.2 + 1.2 + 2 * 0.81) / 3)
    assert gradient == pytest.approx([-1.2, -1.2, -2 * 0.81])
    assert metrics["ratio"].item() == pytest.approx((2 * 1.2 + 0.81) / 3)


def test_gspo_clips_whole_sequences():
    _, gradient, metrics = loss_of(GSPO(clip_low=0.1, clip_high=0.1), [1.44, 1.0, 1.0], [1.0, 1.0, 1.0], [0, 0, 1])
    assert gradient == pytest.approx([0, 0, -1])
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 3)


def test_gspo_is_the_gradient_of_the_sequences_ratio():
    old, new = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.7, -0.6], requires_grad=True)
    (-2.0 * (new - old).mean().exp()).backward()
    _, gradient, _ = loss_of(
        GSPO(clip_low=0.5, clip_high=0.5), [math.exp(d) for d in (-0.1, 0.3, -0.1)], [2.0] * 3, [0, 0, 0]
    )
    assert [slope / 3 for slope in gradient] == pytest.approx(new.grad.tolist(), rel=1e-5)


@pytest.mark.parametrize("config", [GRPO(), GSPO(), CISPO()])
def test_a_policy_that_has_run_away_gives_numbers(config):
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


@pytest.mark.feature(118)
def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely():
    config = GRPO(dual_clip=3.0)
    loss, gradient, metrics = loss_of(config, [5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    assert loss == pytest.approx((3.0 + 2.0 - 1.2) / 3)
    assert gradient == pytest.approx([0, 2.0, 0])
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 3)
    assert loss_of(GRPO(), [5.0], [-1.0])[1] == pytest.approx([5.0])


# -- rollouts of another engine ---------------------------------------------------------------------------------------


def factors(kind, differences, low=0.0, high=2.0, level="token", units=None):
    """Of tokens whose old log-prob is so much above the rollout's."""
    old = torch.zeros(len(differences), dtype=torch.float64)
    columns = {
        "old_logprobs": old,
        "rollout_logprobs": old - torch.tensor(differences, dtype=torch.float64),
        "weight": torch.full_like(old, 1 / len(old)),
        "unit": torch.tensor(units or list(range(len(old)))),
    }
    factor, metrics = correction_weights(columns, kind, level, low, high)
    assert not factor.requires_grad
    return factor.tolist(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.feature(119)
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_policies_need_no_correction(kind, level):
    found, metrics = factors(kind, [0.0, 0.0], level=level)
    assert found == [1, 1]
    assert metrics == {"mismatch_kl": 0, "mismatch_bounded": 0}


@pytest.mark.feature(119)
def test_truncated_at_the_cap():
    found, metrics = factors("truncate", [math.log(1.5), math.log(4), math.log(0.1)])
    assert found == pytest.approx([1.5, 2.0, 0.1])
    assert metrics["mismatch_bounded"] == pytest.approx(1 / 3)


@pytest.mark.feature(119)
def test_masked_outside_of_the_bounds():
    found, _ = factors("mask", [math.log(1.5), math.log(4), math.log(0.1), 0.0], low=0.5)
    assert found == pytest.approx([1.5, 0, 0, 1])


@pytest.mark.feature(119)
def test_a_sequences_weight_is_the_product_of_its_tokens():
    found, _ = factors("truncate", [math.log(1.5), math.log(1.2), 0.3], level="sequence", units=[7, 7, 3])
    assert found == pytest.approx([1.8, 1.8, math.exp(0.3)])
    assert factors("truncate", [500.0, 500.0], level="sequence", units=[1, 1])[0] == [2, 2]


@pytest.mark.feature(119)
def test_the_old_policy_is_compared_and_not_the_current_one():
    """The gradient of a token of ratio r and correction w is that of w r A: r counts once."""
    config = GRPO(correction="truncate", correction_high=10.0, clip_low=0.9, clip_high=9.0)
    rollout = [-1 - math.log(1.5)] * 3
    loss, gradient, _ = loss_of(config, [1.0, 2.0, 4.0], [1.0, 1.0, 1.0], rollout_logprobs=rollout)
    assert loss == pytest.approx(-1.5 * 7 / 3)
    assert gradient == pytest.approx([-1.5, -3.0, -6.0])


@pytest.mark.feature(119)
@pytest.mark.parametrize(("kind", "factor"), [("truncate", 2.0), ("mask", 0.0)])
def test_a_bound_that_nobody_has_said_is_2(kind, factor):
    loss, _, _ = loss_of(GRPO(correction=kind), [1.0, 1.0], [1.0, 1.0], rollout_logprobs=[-1 - math.log(1.9), -2.0])
    assert loss == pytest.approx(-(1.9 + factor) / 2)


@pytest.mark.feature(119)
def test_the_kl_penalty_is_not_corrected():
    config = GRPO(correction="mask", correction_high=1.1, kl_coef=1.0, kl_estimator="k2")
    loss, _, _ = loss_of(config, [1.0], [1.0], rollout_logprobs=[-5.0], ref_logprobs=[-3.0])
    assert loss == pytest.approx(2.0**2 / 2)
