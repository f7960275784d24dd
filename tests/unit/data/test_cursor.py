"""The position in the data."""

import json
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.cursor import PromptCursor


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 3))
def test_row_80_every_row_once_an_epoch(rows, batch_size, seed):
    cursor = PromptCursor(rows, batch_size, seed)
    drawn = list(chain.from_iterable(cursor.next() for _ in range(rows)))
    assert len(drawn) == rows * batch_size
    for start in range(0, len(drawn), rows):
        assert sorted(drawn[start : start + rows]) == list(range(rows))
    assert cursor.epoch == batch_size


def test_each_epoch_and_seed_has_its_own_order():
    cursor = PromptCursor(50, 50, seed=3)
    first, second = cursor.next(), cursor.next()
    assert first != second
    assert PromptCursor(50, 50, seed=3).next() == first
    assert PromptCursor(50, 50, seed=4).next() != first


def test_the_order_is_a_fixed_function_of_the_seed():
    assert PromptCursor(8, 8, seed=0).next() == [6, 3, 5, 0, 7, 2, 1, 4]


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 12))
def test_a_cursor_goes_on_from_its_saved_state(rows, batch_size, steps):
    cursor = PromptCursor(rows, batch_size, seed=1)
    for _ in range(steps):
        cursor.next()
    other = PromptCursor(rows, batch_size, seed=1)
    other.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert [other.next() for _ in range(4)] == [cursor.next() for _ in range(4)]


@pytest.mark.parametrize(
    "state", [{}, {"rows": 5, "seed": 1, "drawn": 0}, {"rows": 4, "seed": 2, "drawn": 0}, {"rows": 4, "seed": 1}]
)
def test_a_state_of_other_data_is_refused(state):
    with pytest.raises(DataError, match="does not fit"):
        PromptCursor(4, 2, seed=1).load_state_dict(state)


@pytest.mark.parametrize("arguments", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_sizes_are_refused(arguments):
    with pytest.raises(ValueError, match="need rows"):
        PromptCursor(*arguments)
