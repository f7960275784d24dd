# SPDX-License-Identifier: Apache-2.0
"""Rows as samples."""

import numpy as np
import pytest

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.columns import SampleView
from dlrover.python.rl.algorithm.reinforce import ReinforcePlusPlus
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Ragged
from tests.support.ragged_updates import rows_of

NAN = float("nan")


@pytest.mark.feature(88)
def test_two_rows_one_trajectory_one_advantage_and_one_weight():
    rows = rows_of([1, 1, 1], [0.25, 0.75, 0], [1, 3, 2]).with_columns(trajectory=np.array([5, 5, 9]))
    annotated = GRPO(normalize="none").annotate(rows)
    assert annotated.dense("advantage").tolist() == [0.5, 0.5, -0.5]
    assert annotated.dense("weight") == pytest.approx([1 / 8, 1 / 8, 1 / 4])


def test_a_trajectory_that_failed_in_one_row_counts_nowhere():
    rows = rows_of([1, 1, 1, 1], [1, NAN, 1, 0], [1, 1, 1, 1]).with_columns(trajectory=np.array([0, 0, 1, 2]))
    annotated = GRPO(normalize="none").annotate(rows)
    assert annotated.dense("advantage").tolist() == [0, 0, 0.5, -0.5]
    assert annotated.dense("weight").tolist() == [0, 0, 0.5, 0.5]


@pytest.mark.parametrize("averaging", ["token", "sequence"])
def test_a_masked_sample_has_no_weight_and_its_reward_counts_in_its_group(averaging):
    """Beside it the others weigh as without it."""
    rows = rows_of([1, 1, 1, 1], [1, 3, 0, 0], [1, 3, 2, 5]).with_columns(trajectory=np.array([0, 1, 2, 2]))
    algorithm = GRPO(normalize="none", averaging=averaging)
    masked = algorithm.annotate(rows.with_columns(masked=np.array([False, False, True, False])))
    assert masked.dense("advantage").tolist() == algorithm.annotate(rows).dense("advantage").tolist()
    alone = algorithm.annotate(rows_of([1, 1], [1, 3], [1, 3])).dense("weight").tolist()
    assert masked.dense("weight").tolist() == [*alone, 0, 0]


def test_a_row_without_an_action_adds_its_reward_only():
    rows = rows_of([1, 1, 1], [0, 2, 1], [2, 0, 2]).with_columns(trajectory=np.array([0, 0, 1]))
    annotated = GRPO(normalize="none").annotate(rows)
    assert annotated.dense("advantage").tolist() == [0.5, 0, -0.5]
    assert annotated.dense("weight").tolist() == [0.25, 0, 0.25]


def test_rows_of_a_trajectory_need_not_be_neighbours():
    rows = rows_of([4, 8, 4], [1, 2, 3], [1, 1, 1]).with_columns(trajectory=np.array([7, 2, 7]))
    samples = SampleView.of(rows)
    assert samples.of_row.tolist() == [1, 0, 1]
    assert samples.reward.tolist() == [2, 4]
    assert samples.prompt_id.tolist() == [8, 4]
    assert samples.action_tokens.tolist() == [1, 2]


def test_a_mask_with_other_numbers_of_actions_is_refused():
    rows = rows_of([1], [1], [1]).with_columns(action_mask=Ragged.from_rows([[False, True, True]], dtype=np.bool_))
    with pytest.raises(DataError, match="differ from the token counts"):
        ReinforcePlusPlus().annotate(rows)
