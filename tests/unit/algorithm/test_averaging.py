# SPDX-License-Identifier: Apache-2.0
"""Weights per token."""

import numpy as np
import pytest

from dlrover.python.rl.algorithm.losses.columns import token_weights

ALL = np.ones(2, dtype=bool)
LENGTHS = np.array([1, 3])


@pytest.mark.feature(121)
@pytest.mark.parametrize(
    ("mode", "expected"), [("token", [1 / 4, 1 / 4]), ("sequence", [1 / 2, 1 / 6]), ("constant", [1 / 20, 1 / 20])]
)
def test_lengths_one_and_three_by_hand(mode, expected):
    weights = token_weights(LENGTHS, ALL, mode, max_tokens=10)
    assert weights == pytest.approx(expected)
    assert weights.dtype == np.float32


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_rows_that_do_not_count_change_nothing(mode):
    alone = token_weights(LENGTHS, ALL, mode, max_tokens=10)
    lengths, valid = np.array([5, 1, 0, 3]), np.array([False, True, True, True])
    assert token_weights(lengths, valid, mode, max_tokens=10).tolist() == [0, alone[0], 0, alone[1]]


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_nothing_that_counts_gives_zeros(mode):
    assert token_weights(LENGTHS, ~ALL, mode, max_tokens=10).tolist() == [0, 0]


def test_weights_of_a_mean_add_up_to_one():
    lengths = np.arange(1, 30)
    for mode in ("token", "sequence"):
        weights = token_weights(lengths, np.ones(29, dtype=bool), mode)
        assert (weights * lengths).sum() == pytest.approx(1, abs=1e-6)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="unknown averaging 'tokens'; did you mean 'token'"):
        token_weights(LENGTHS, ALL, "tokens")
    with pytest.raises(ValueError, match="divides by max_tokens"):
        token_weights(LENGTHS, ALL, "constant")
