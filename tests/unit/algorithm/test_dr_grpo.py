# SPDX-License-Identifier: Apache-2.0
"""Dr. GRPO by hand."""

import pytest
import torch

from dlrover.python.rl.algorithm.dr_grpo import DrGRPO
from tests.support.ragged_updates import random_update, rows_of, run

PAPER = DrGRPO(averaging="constant", max_tokens=10)


@pytest.mark.feature(111)
def test_rewards_one_and_zero():
    annotated = DrGRPO().annotate(rows_of([4, 4], [1, 0], [1, 3]))
    assert annotated.dense("advantage").tolist() == [0.5, -0.5]
    assert annotated.dense("weight").tolist() == [0.25, 0.25]


@pytest.mark.feature(111)
def test_the_loss_is_a_token_mean():
    annotated = DrGRPO().annotate(rows_of([4, 4], [1, 0], [1, 3]))
    logprobs = torch.full((4,), -1.0)
    loss, gradient, _ = run(DrGRPO(), annotated, logprobs, logprobs, logprobs)
    assert loss == pytest.approx((-0.5 + 3 * 0.5) / 4)
    assert gradient.tolist() == pytest.approx([-0.125, 0.125, 0.125, 0.125])


@pytest.mark.feature(111)
def test_the_papers_constant():
    annotated = PAPER.annotate(rows_of([4, 4], [1, 0], [1, 3]))
    logprobs = torch.full((4,), -1.0)
    loss, gradient, metrics = run(PAPER, annotated, logprobs, logprobs, logprobs)
    assert loss == pytest.approx((-0.5 / 10 + 3 * 0.5 / 10) / 2)
    assert gradient.tolist() == pytest.approx([-0.025, 0.025, 0.025, 0.025])
    assert metrics["weight"] == pytest.approx(4 / 20)


def test_the_papers_weight_of_a_token_does_not_depend_on_lengths():
    short, long = (PAPER.annotate(rows_of([1, 1], [1, 0], lengths)).dense("weight") for lengths in ([1, 1], [9, 7]))
    assert short.tolist() == long.tolist()


@pytest.mark.feature(122)
@pytest.mark.parametrize("config", [DrGRPO(), PAPER, DrGRPO(clip_low=0.05, clip_high=0.1)])
@pytest.mark.parametrize("parts", [2, 4, 16])
def test_parts_change_neither_gradient_nor_metrics(config, parts):
    rows, *logprobs = random_update(5)
    annotated = config.annotate(rows)
    whole, split = run(config, annotated, *logprobs), run(config, annotated, *logprobs, parts=parts)
    assert split[0] == pytest.approx(whole[0], abs=1e-9)
    torch.testing.assert_close(split[1], whole[1], rtol=0, atol=0)
    assert split[2] == pytest.approx(whole[2], abs=1e-6)  # Metrics are float32 sums.


@pytest.mark.parametrize("options", [{"averaging": "constant"}, {"max_tokens": 5}])
def test_max_tokens_goes_with_the_constant(options):
    with pytest.raises(ValueError, match="max_tokens goes with averaging 'constant'"):
        DrGRPO(**options)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="samples_per_prompt is 1"):
        DrGRPO().check_group_size(1)
