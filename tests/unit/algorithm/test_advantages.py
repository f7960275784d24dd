# SPDX-License-Identifier: Apache-2.0
"""Group-relative advantages."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.algorithm.losses.columns import group_advantages


def advantages(prompt_id, reward, normalize="std"):
    return group_advantages(np.array(prompt_id), np.array(reward, dtype=float), normalize)


@pytest.mark.feature(113)
def test_each_prompt_has_its_own_baseline():
    assert np.sign(advantages([1, 1, 2, 2], [10, 12, 0, 1])).tolist() == [-1, 1, -1, 1]
    assert advantages([1, 1, 2, 2], [10, 12, 0, 1], "none").tolist() == [-1, 1, -0.5, 0.5]


@pytest.mark.feature(113)
def test_groups_need_not_be_adjacent():
    assert advantages([1, 2, 1, 2], [10, 0, 12, 1], "none").tolist() == [-1, -0.5, 1, 0.5]


@pytest.mark.feature(112)
def test_population_deviation_and_no_nan():
    assert advantages([5, 5], [1, 0]) == pytest.approx([1, -1], abs=1e-5)
    assert advantages([5, 5, 5], [0.1, 0.1, 0.1]).tolist() == [0, 0, 0]
    assert advantages([5], [3.0]).tolist() == [0]


def test_failed_samples_are_in_no_statistic():
    found = advantages([1, 1, 1, 2], [1, np.nan, 0, np.nan], "none")
    assert found.tolist() == [0.5, 0, -0.5, 0]


def test_rows_marked_invalid_are_in_no_statistic():
    valid = np.array([True, False, True])
    assert group_advantages(np.ones(3), np.array([1.0, 9.0, 0.0]), "none", valid).tolist() == [0.5, 0, -0.5]


def test_an_empty_batch_is_no_error():
    assert advantages([], []).tolist() == []


@given(
    st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(-5, 5), st.floats(-1e6, 1e6))), max_size=20),
    st.sampled_from(["none", "std"]),
)
def test_equals_a_plain_reference(samples, normalize):
    prompt_id = [prompt for prompt, _ in samples]
    reward = [float("nan") if value is None else float(value) for _, value in samples]
    found = advantages(np.array(prompt_id, dtype=np.int64), reward, normalize)
    for row, (prompt, value) in enumerate(samples):
        group = [float(other) for of, other in samples if of == prompt and other is not None]
        if value is None or len(set(group)) == 1:
            assert found[row] == 0
            continue
        expected = value - statistics.fmean(group)
        if normalize == "std":
            expected /= statistics.pstdev(group) + 1e-6
        assert found[row] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="unknown normalize 'sd'"):
        advantages([1], [1.0], "sd")
    with pytest.raises(ValueError, match=r"infinite rewards in rows \[1\]"):
        advantages([1, 1], [1.0, np.inf])
