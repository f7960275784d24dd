# SPDX-License-Identifier: Apache-2.0
"""Algorithms on a few rows, by hand: GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++, SFT."""

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.dr_grpo import DrGRPO
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.columns import SampleView, whiten
from dlrover.python.rl.algorithm.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from dlrover.python.rl.algorithm.rloo import RLOO
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch, Ragged
from tests.support.loss_updates import rows_of, run, token_rows


@pytest.mark.feature(112)
def test_grpo_of_equal_rewards_has_no_gradient():
    annotated = GRPO().annotate(rows_of([1, 1, 1], [0.1, 0.1, 0.1], [1, 2, 3]))
    assert annotated.dense("advantage").tolist() == [0, 0, 0]
    logprobs = torch.full((6,), -1.0)
    loss, gradient, _ = run(GRPO(), annotated, logprobs)
    assert loss == 0
    assert gradient.tolist() == [0] * 6


def test_grpo_ignores_the_rounding_of_equal_rewards():
    sums = [33.3 + 66.7, 99.9 + 0.1, 0.1 + 0.2 + 99.7, 100.0 + 1e-8]
    rows = rows_of([1] * 4, sums, [1] * 4)
    assert len(set(sums)) > 1
    for normalize in ("none", "std", "std_unbiased"):
        assert GRPO(normalize=normalize).annotate(rows).dense("advantage").tolist() == [0] * 4


def test_grpo_skips_failed_and_empty_rows():
    annotated = GRPO().annotate(rows_of([1, 1, 1, 1], [1, float("nan"), 0, 50], [2, 4, 1, 0]))
    assert annotated.dense("advantage") == pytest.approx([1, 0, -1, 0], abs=1e-5)
    assert annotated.dense("weight") == pytest.approx([1 / 4, 0, 1 / 2, 0])


def test_grpo_penalty_needs_the_reference():
    columns = {name: torch.zeros(1) for name in ("advantage", "weight", "old_logprobs")}
    with pytest.raises(DataError, match="needs the column 'ref_logprobs'"):
        GRPO(kl_coef=0.1).loss(torch.zeros(1), columns)
    assert "kl" not in GRPO().loss(torch.zeros(1), columns)[1]


PAPER = DrGRPO(averaging="constant", max_tokens=10)


@pytest.mark.feature(111)
@pytest.mark.parametrize(("algorithm", "divisor"), [(DrGRPO(), 4), (PAPER, 20)])
def test_dr_grpo_by_hand(algorithm, divisor):
    annotated = algorithm.annotate(rows_of([4, 4], [1, 0], [1, 3]))
    assert annotated.dense("advantage").tolist() == [0.5, -0.5]
    assert annotated.dense("weight") == pytest.approx([1 / divisor] * 2)
    loss, gradient, metrics = run(algorithm, annotated, torch.full((4,), -1.0))
    assert loss == pytest.approx((-0.5 + 3 * 0.5) / divisor)
    assert gradient.tolist() == pytest.approx([-0.5 / divisor, *[0.5 / divisor] * 3])
    assert metrics["weight"] == pytest.approx(4 / divisor)


def test_dr_grpo_constant_weight_is_the_same_at_any_length():
    short, long = (PAPER.annotate(rows_of([1, 1], [1, 0], lengths)).dense("weight") for lengths in ([1, 1], [9, 7]))
    assert short.tolist() == long.tolist()


NAN = float("nan")


def test_dapo_over_long_answers_lose_linearly_in_the_buffer():
    rows = rows_of([1] * 6, [0] * 6, [1, 6, 7, 8, 10, 12])
    rewards = DAPO(max_tokens=10, overlong_buffer=4).rewards(SampleView.of(rows))
    assert rewards.tolist() == [0, 0, -0.25, -0.5, -1, -1]


def test_dapo_shaping_is_part_of_the_compared_reward():
    rows = rows_of([1, 1], [1, 1], [6, 10])
    plain, shaped = DAPO(normalize="none"), DAPO(normalize="none", max_tokens=10, overlong_buffer=4)
    assert plain.annotate(rows).dense("advantage").tolist() == [0, 0]
    assert shaped.annotate(rows).dense("advantage") == pytest.approx([0.5, -0.5])
    twice = DAPO(normalize="none", max_tokens=10, overlong_buffer=4, overlong_penalty=2.0)
    assert twice.annotate(rows).dense("advantage") == pytest.approx([1, -1])


def test_dapo_clips_higher_ratios_later():
    annotated = DAPO().annotate(rows_of([1, 1], [1, 0], [2, 2]))
    moved = torch.tensor([1.25, 1.3, 0.75, 0.9]).log()
    _, gradient, metrics = run(DAPO(), annotated, moved, torch.zeros(4))
    assert (gradient == 0).tolist() == [False, True, True, False]
    assert metrics["clip_fraction"] == pytest.approx(0.5)
    assert annotated.dense("weight").tolist() == [0.25, 0.25]


def test_rloo_on_policy_is_reinforce_on_sequences():
    annotated = RLOO().annotate(rows_of([1, 1, 1], [3, 0, 0], [1, 2, 3]))
    _, gradient, _ = run(RLOO(), annotated, torch.full((6,), -1.0))
    assert gradient.tolist() == pytest.approx([-1.0, *[0.5] * 5])


def test_rloo_subtracts_the_kl_of_the_sequence():
    rows = token_rows([[False, True, True], [False, True]], [[0, 0, 0], [0, 0]], [1.0, 1.0])
    rows = rows.with_columns(
        prompt_id=np.array([1, 1]),
        old_logprobs=Ragged.from_rows([[0, -1.0, -1.0], [0, -1.0]], dtype=np.float32),
        ref_logprobs=Ragged.from_rows([[0, -2.0, -1.5], [0, -1.0]], dtype=np.float32),
    )
    assert RLOO(kl_coef=0.2).annotate(rows).dense("advantage") == pytest.approx([-0.3, 0.3])


def test_reinforce_pp_normalises_over_all_tokens():
    rows = token_rows([[False, True, True, True], [False, True]], [[0] * 4, [0] * 2], [1.0, 0.0])
    advantage = ReinforcePlusPlus().annotate(rows).ragged("advantage")
    assert advantage[0] == pytest.approx([0, 0.5, 0.5, 0.5], abs=1e-6)
    assert advantage[1] == pytest.approx([0, -1.5], abs=1e-6)


def test_reinforce_pp_discounts_later_rewards():
    rows = token_rows([[False, True, True, True]], [[0] * 4], [4.0])
    discounted = ReinforcePlusPlus(gamma=0.5).annotate(rows).ragged("advantage").values[1:]
    assert discounted == pytest.approx(whiten(np.array([1.0, 2.0, 4.0])), abs=1e-6)


def test_reinforce_pp_baseline_compares_groups_then_tokens():
    annotated = ReinforcePlusPlusBaseline().annotate(rows_of([1, 1, 2, 2], [10, 8, 1, 0], [3, 1, 1, 1]))
    centred = [1, 1, 1, -1, 0.5, -0.5]
    assert annotated.dense("advantage") == pytest.approx(whiten(np.array(centred))[[0, 3, 4, 5]], abs=1e-6)


ROWS = Batch({"action_tokens": np.array([1, 3, 0])})
LOGPROBS = torch.tensor([-1.0, -2.0, -3.0, -4.0])


@pytest.mark.feature(121)
@pytest.mark.parametrize(("averaging", "expected"), [("token", 10 / 4), ("sequence", (1 + 9 / 3) / 2)])
def test_sft_by_hand(averaging, expected):
    algorithm = SFT(averaging)
    loss, _, metrics = run(algorithm, algorithm.annotate(ROWS), LOGPROBS)
    assert loss == pytest.approx(expected)
    assert metrics == {"nll": pytest.approx(expected)}


def test_sft_needs_no_reward_and_takes_any_group_size():
    SFT().check_group_size(1)
    annotated = SFT().annotate(ROWS)
    assert annotated.dense("weight").tolist() == [0.25, 0.25, 0]
