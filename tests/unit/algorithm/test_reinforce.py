# SPDX-License-Identifier: Apache-2.0
"""RLOO and REINFORCE++ by hand."""

import numpy as np
import pytest
import torch
from test_gae import rows_of as token_rows

from dlrover.python.rl.algorithm.losses.columns import leave_one_out, whiten
from dlrover.python.rl.algorithm.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from dlrover.python.rl.algorithm.rloo import RLOO
from dlrover.python.rl.data.batch import Ragged
from tests.support.ragged_updates import rows_of, run

NAN = float("nan")


def test_the_baseline_is_the_mean_of_the_others():
    prompt, reward = np.array([3, 3, 8, 3, 8, 5]), np.array([1.0, 4.0, 0.0, NAN, 1.0, 9.0])
    assert leave_one_out(prompt, reward, ~np.isnan(reward)).tolist() == [-3, 3, -1, 0, 1, 0]


def test_rloo_on_policy_is_reinforce_on_whole_sequences():
    annotated = RLOO().annotate(rows_of([1, 1, 1], [3, 0, 0], [1, 2, 3]))
    logprobs = torch.full((6,), -1.0)
    _, gradient, _ = run(RLOO(), annotated, logprobs, logprobs, logprobs)
    assert gradient.tolist() == pytest.approx([-1.0, *[0.5] * 5])


def test_rloo_takes_the_kl_of_the_whole_sequence_off_its_reward():
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


def test_reinforce_pp_discounts_what_is_still_to_come():
    rows = token_rows([[False, True, True, True]], [[0] * 4], [4.0])
    discounted = ReinforcePlusPlus(gamma=0.5).annotate(rows).ragged("advantage").values[1:]
    assert discounted == pytest.approx(whiten(np.array([1.0, 2.0, 4.0])), abs=1e-6)


def test_the_baseline_variant_compares_within_groups_and_then_over_tokens():
    annotated = ReinforcePlusPlusBaseline().annotate(rows_of([1, 1, 2, 2], [10, 8, 1, 0], [3, 1, 1, 1]))
    centred = [1, 1, 1, -1, 0.5, -0.5]
    assert annotated.dense("advantage") == pytest.approx(whiten(np.array(centred))[[0, 3, 4, 5]], abs=1e-6)


def test_whitened_numbers_have_mean_0_and_unbiased_variance_1():
    found = whiten(np.random.default_rng(0).normal(3, 5, 1000))
    assert found.mean() == pytest.approx(0, abs=1e-12)
    assert found.var(ddof=1) == pytest.approx(1)


def test_whitening_counts_each_number_as_often_as_it_is_there():
    values, counts = np.array([1.0, 4.0, 2.0, NAN]), np.array([3, 1, 2, 0])
    repeated = whiten(np.repeat(values, counts))
    assert whiten(values, counts) == pytest.approx([repeated[0], repeated[3], repeated[4], 0])


@pytest.mark.parametrize("values", [[], [5.0], [0.1, 0.1, 0.1]])
def test_there_is_nothing_to_whiten_in_equal_numbers(values):
    assert whiten(np.array(values)).tolist() == [0] * len(values)
