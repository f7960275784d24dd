# SPDX-License-Identifier: Apache-2.0
"""The held-out split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.source import hold_out


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40), st.integers(0, 5), st.data())
def test_hold_out_never_puts_a_prompt_on_both_sides(prompts, seed, data):
    rows = list(prompts)
    count = data.draw(st.integers(1, len(rows) - 1))
    try:
        train, held = hold_out(rows, count, seed)
    except DataError:
        return  # Too few different prompts.
    assert sorted(train + held) == list(range(len(rows)))
    assert len(held) >= count
    assert train
    assert not {prompts[index] for index in train} & {prompts[index] for index in held}


@pytest.mark.feature(76)
def test_three_percent_fixed_by_the_seed():
    rows = [[{"role": "user", "content": str(index)}] for index in range(200)]
    train, held = hold_out(rows, 0.03, seed=1)
    assert len(held) == 6
    assert len(train) == 194
    assert hold_out(rows, 6, seed=1) == (train, held)
    assert hold_out(rows, 0.03, seed=2)[1] != held
    backwards = hold_out(rows[::-1], 0.03, seed=1)[1]
    assert sorted(199 - index for index in backwards) == held


@pytest.mark.parametrize("size", [0, 3, -1, 0.0, 1.0, float("nan")])
def test_a_split_must_leave_both_sides_a_row(size):
    with pytest.raises(ValueError, match="held"):
        hold_out(["a", "b", "c"], size, 0)


def test_copies_of_one_prompt_cannot_be_split():
    with pytest.raises(DataError, match="too few prompts"):
        hold_out(["a"] * 3, 1, 0)
