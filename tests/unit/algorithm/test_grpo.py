# SPDX-License-Identifier: Apache-2.0
"""GRPO against a slow reference."""

import math
import statistics

import pytest
import torch

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.common.errors import DataError
from tests.support.ragged_updates import random_update, rows_of, run


def slow_loss(config: GRPO, rows, logprobs, old, ref) -> float:
    """Eq. 3 sample by sample and token by token."""
    prompts, rewards, lengths = (rows.dense(name).tolist() for name in ("prompt_id", "reward", "action_tokens"))
    counted = [row for row in range(len(rows)) if not math.isnan(rewards[row]) and lengths[row] > 0]
    sums, total = [], 0
    for row in counted:
        group = [rewards[other] for other in counted if prompts[other] == prompts[row]]
        mean = sum(group) / len(group)
        advantage = rewards[row] - mean
        if config.normalize != "none" and len(group) > 1:
            deviation = {"std": statistics.pstdev, "std_unbiased": statistics.stdev}[config.normalize](group)
            advantage /= deviation + 1e-6
        start = sum(lengths[:row])
        losses = []
        for token in range(start, start + lengths[row]):
            ratio = math.exp(logprobs[token] - old[token])
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            x = float(logprobs[token] - ref[token])
            penalty = {"k2": x * x / 2, "k3": x + math.exp(-x) - 1}[config.kl_estimator]
            losses.append(-min(advantage * ratio, advantage * clipped) + config.kl_coef * penalty)
        sums.append(sum(losses) / (len(losses) if config.averaging == "sequence" else 1))
        total += len(losses)
    return sum(sums) / (len(counted) if config.averaging == "sequence" else total)


CONFIGS = [
    GRPO(),
    GRPO(normalize="std_unbiased"),
    GRPO(kl_coef=0.04),
    GRPO(kl_coef=0.5, kl_estimator="k2", averaging="token", normalize="none", clip_low=0.1, clip_high=0.28),
]


@pytest.mark.feature(112)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_slow_reference(config, seed):
    rows, *logprobs = random_update(seed)
    loss, _, metrics = run(config, config.annotate(rows), *logprobs)
    assert loss == pytest.approx(slow_loss(config, rows, *logprobs), abs=1e-6)
    assert metrics["weight"] == pytest.approx(1, abs=1e-6)


@pytest.mark.feature(122)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("parts", [2, 4, 16])
def test_parts_change_neither_gradient_nor_metrics(config, parts):
    rows, *logprobs = random_update(11)
    annotated = config.annotate(rows)
    whole, split = run(config, annotated, *logprobs), run(config, annotated, *logprobs, parts=parts)
    assert split[0] == pytest.approx(whole[0], abs=1e-9)
    torch.testing.assert_close(split[1], whole[1], rtol=0, atol=0)
    assert split[2] == pytest.approx(whole[2], abs=1e-6)  # Metrics are float32 sums.


@pytest.mark.feature(112)
def test_equal_rewards_give_no_gradient():
    annotated = GRPO().annotate(rows_of([1, 1, 1], [0.1, 0.1, 0.1], [1, 2, 3]))
    assert annotated.dense("advantage").tolist() == [0, 0, 0]
    logprobs = torch.full((6,), -1.0)
    loss, gradient, _ = run(GRPO(), annotated, logprobs, logprobs, logprobs)
    assert loss == 0
    assert gradient.tolist() == [0] * 6


def test_rounding_of_equal_rewards_is_no_signal():
    sums = [33.3 + 66.7, 99.9 + 0.1, 0.1 + 0.2 + 99.7, 100.0 + 1e-8]
    rows = rows_of([1] * 4, sums, [1] * 4)
    assert len(set(sums)) > 1
    for normalize in ("none", "std", "std_unbiased"):
        assert GRPO(normalize=normalize).annotate(rows).dense("advantage").tolist() == [0] * 4


def test_failed_and_empty_rows_count_nowhere():
    annotated = GRPO().annotate(rows_of([1, 1, 1, 1], [1, float("nan"), 0, 50], [2, 4, 1, 0]))
    assert annotated.dense("advantage") == pytest.approx([1, 0, -1, 0], abs=1e-5)
    assert annotated.dense("weight") == pytest.approx([1 / 4, 0, 1 / 2, 0])


def test_a_penalty_needs_the_reference():
    columns = {name: torch.zeros(1) for name in ("advantage", "weight", "old_logprobs")}
    with pytest.raises(DataError, match="needs the column 'ref_logprobs'"):
        GRPO(kl_coef=0.1).loss(torch.zeros(1), columns)
    assert "kl" not in GRPO().loss(torch.zeros(1), columns)[1]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"clip_low": -0.1}, "clip_low: input should be greater than or equal to 0, got -0.1"),
        ({"clip_low": 1.0}, "clip_low: input should be less than 1"),
        ({"kl_coef": float("nan")}, "kl_coef: input should be greater than or equal to 0, got nan"),
        ({"kl_estimator": "k1"}, "k1 cannot be a loss"),
        ({"averaging": "constant"}, "averaging: input should be 'token' or 'sequence', got 'constant'"),
    ],
)
def test_wrong_options_are_refused(options, what):
    with pytest.raises(ValueError, match=what):
        GRPO(**options)


def test_a_group_of_one_is_refused():
    GRPO().check_group_size(2)
    with pytest.raises(ValueError, match="samples_per_prompt is 1"):
        GRPO().check_group_size(1)
