# SPDX-License-Identifier: Apache-2.0
"""Columns of a loss: advantages of groups, weights of tokens, rows as samples, whitened numbers."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.columns import (
    SampleView,
    group_advantages,
    leave_one_out,
    token_weights,
    whiten,
)
from dlrover.python.rl.algorithm.reinforce import ReinforcePlusPlus
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Ragged
from tests.support.loss_updates import rows_of

NAN = float("nan")


def advantages(prompt_id, reward, normalize="std"):
    return group_advantages(np.array(prompt_id), np.array(reward, dtype=float), normalize)


@pytest.mark.feature(112, 113)
@pytest.mark.parametrize(
    ("prompt_id", "reward", "normalize", "expected"),
    [
        ([1, 1, 2, 2], [10, 12, 0, 1], "std", [-1, 1, -1, 1]),
        ([1, 2, 1, 2], [10, 0, 12, 1], "none", [-1, -0.5, 1, 0.5]),
        ([5, 5, 5], [0.1, 0.1, 0.1], "std", [0, 0, 0]),
        ([5], [3.0], "std", [0]),
        ([1, 1, 1, 2], [1, NAN, 0, NAN], "none", [0.5, 0, -0.5, 0]),
        ([], [], "std", []),
    ],
)
def test_group_advantages_by_hand(prompt_id, reward, normalize, expected):
    assert advantages(prompt_id, reward, normalize) == pytest.approx(expected, abs=1e-5)


def test_group_advantages_skip_invalid_rows():
    valid = np.array([True, False, True])
    assert group_advantages(np.ones(3), np.array([1.0, 9.0, 0.0]), "none", valid).tolist() == [0.5, 0, -0.5]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(-5, 5), st.floats(-1e6, 1e6))), max_size=20),
    st.sampled_from(["none", "std"]),
)
def test_group_advantages_equal_a_plain_reference(samples, normalize):
    prompt_id = [prompt for prompt, _ in samples]
    reward = [float("nan") if value is None else float(value) for _, value in samples]
    actual = advantages(np.array(prompt_id, dtype=np.int64), reward, normalize)
    for row, (prompt, value) in enumerate(samples):
        group = [float(other) for its_prompt, other in samples if its_prompt == prompt and other is not None]
        if value is None or len(set(group)) == 1:
            assert actual[row] == 0
            continue
        expected = value - statistics.fmean(group)
        if normalize == "std":
            expected /= statistics.pstdev(group) + 1e-6
        assert actual[row] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advantages([1], [1.0], "sd"), "unknown normalize 'sd'"),
        (lambda: advantages([1, 1], [1.0, np.inf]), r"infinite rewards in rows \[1\]"),
        (lambda: token_weights(LENGTHS, ALL, "tokens"), "unknown averaging 'tokens'; did you mean 'token'"),
        (lambda: token_weights(LENGTHS, ALL, "constant"), "divides by max_tokens"),
    ],
)
def test_columns_refuse_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ALL = np.ones(2, dtype=bool)
LENGTHS = np.array([1, 3])


@pytest.mark.feature(121)
@pytest.mark.parametrize(
    ("mode", "expected"), [("token", [1 / 4, 1 / 4]), ("sequence", [1 / 2, 1 / 6]), ("constant", [1 / 20, 1 / 20])]
)
def test_token_weights_by_hand(mode, expected):
    weights = token_weights(LENGTHS, ALL, mode, max_tokens=10)
    assert weights == pytest.approx(expected)
    assert weights.dtype == np.float32


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_token_weights_skip_invalid_rows(mode):
    alone = token_weights(LENGTHS, ALL, mode, max_tokens=10)
    lengths, valid = np.array([5, 1, 0, 3]), np.array([False, True, True, True])
    assert token_weights(lengths, valid, mode, max_tokens=10).tolist() == [0, alone[0], 0, alone[1]]
    assert token_weights(LENGTHS, ~ALL, mode, max_tokens=10).tolist() == [0, 0]


def test_token_weights_of_a_mean_add_up_to_one():
    lengths = np.arange(1, 30)
    for mode in ("token", "sequence"):
        weights = token_weights(lengths, np.ones(29, dtype=bool), mode)
        assert (weights * lengths).sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.feature(88)
def test_rows_of_a_trajectory_share_advantage_and_weight():
    rows = rows_of([1, 1, 1], [0.25, 0.75, 0], [1, 3, 2]).with_columns(trajectory=np.array([5, 5, 9]))
    annotated = GRPO(normalize="none").annotate(rows)
    assert annotated.dense("advantage").tolist() == [0.5, 0.5, -0.5]
    assert annotated.dense("weight") == pytest.approx([1 / 8, 1 / 8, 1 / 4])


def test_failed_row_excludes_its_trajectory():
    rows = rows_of([1, 1, 1, 1], [1, NAN, 1, 0], [1, 1, 1, 1]).with_columns(trajectory=np.array([0, 0, 1, 2]))
    annotated = GRPO(normalize="none").annotate(rows)
    assert annotated.dense("advantage").tolist() == [0, 0, 0.5, -0.5]
    assert annotated.dense("weight").tolist() == [0, 0, 0.5, 0.5]


@pytest.mark.parametrize("averaging", ["token", "sequence"])
def test_masked_sample_has_a_reward_but_no_weight(averaging):
    rows = rows_of([1, 1, 1, 1], [1, 3, 0, 0], [1, 3, 2, 5]).with_columns(trajectory=np.array([0, 1, 2, 2]))
    algorithm = GRPO(normalize="none", averaging=averaging)
    masked = algorithm.annotate(rows.with_columns(masked=np.array([False, False, True, False])))
    assert masked.dense("advantage").tolist() == algorithm.annotate(rows).dense("advantage").tolist()
    alone = algorithm.annotate(rows_of([1, 1], [1, 3], [1, 3])).dense("weight").tolist()
    assert masked.dense("weight").tolist() == [*alone, 0, 0]


def test_row_without_an_action_adds_its_reward_only():
    rows = rows_of([1, 1, 1], [0, 2, 1], [2, 0, 2]).with_columns(trajectory=np.array([0, 0, 1]))
    annotated = GRPO(normalize="none").annotate(rows)
    assert annotated.dense("advantage").tolist() == [0.5, 0, -0.5]
    assert annotated.dense("weight").tolist() == [0.25, 0, 0.25]


def test_sample_view_finds_rows_that_are_not_neighbours():
    rows = rows_of([4, 8, 4], [1, 2, 3], [1, 1, 1]).with_columns(trajectory=np.array([7, 2, 7]))
    samples = SampleView.of(rows)
    assert samples.of_row.tolist() == [1, 0, 1]
    assert samples.reward.tolist() == [2, 4]
    assert samples.prompt_id.tolist() == [8, 4]
    assert samples.action_tokens.tolist() == [1, 2]


def test_mask_with_other_numbers_of_actions_is_refused():
    rows = rows_of([1], [1], [1]).with_columns(action_mask=Ragged.from_rows([[False, True, True]], dtype=np.bool_))
    with pytest.raises(DataError, match="differ from the token counts"):
        ReinforcePlusPlus().annotate(rows)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    prompt, reward = np.array([3, 3, 8, 3, 8, 5]), np.array([1.0, 4.0, 0.0, NAN, 1.0, 9.0])
    assert leave_one_out(prompt, reward, ~np.isnan(reward)).tolist() == [-3, 3, -1, 0, 1, 0]


def test_whiten_gives_mean_0_and_unbiased_variance_1():
    whitened = whiten(np.random.default_rng(0).normal(3, 5, 1000))
    assert whitened.mean() == pytest.approx(0, abs=1e-12)
    assert whitened.var(ddof=1) == pytest.approx(1)


def test_whiten_repeats_numbers_by_their_counts():
    values, counts = np.array([1.0, 4.0, 2.0, NAN]), np.array([3, 1, 2, 0])
    repeated = whiten(np.repeat(values, counts))
    assert whiten(values, counts) == pytest.approx([repeated[0], repeated[3], repeated[4], 0])


@pytest.mark.parametrize("values", [[], [5.0], [0.1, 0.1, 0.1]])
def test_whiten_gives_0_for_equal_numbers(values):
    assert whiten(np.array(values)).tolist() == [0] * len(values)
