# SPDX-License-Identifier: Apache-2.0
"""The position in the data."""

import json
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.sampler import PromptCursor
from dlrover.python.rl.recipe.online.prompts import JobCursor


@pytest.mark.feature(80)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 3))
def test_every_row_once_an_epoch(rows, batch_size, seed):
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
    ("state", "places"),
    [
        ({}, ["rows", "seed", "drawn"]),
        ({"rows": 5, "seed": 1, "drawn": 0}, ["rows"]),
        ({"rows": 4, "seed": 2, "drawn": 0}, ["seed"]),
        ({"rows": 4, "seed": 1}, ["drawn"]),
    ],
)
def test_a_state_of_other_data_is_refused(state, places):
    with pytest.raises(DataError, match="does not fit") as caught:
        PromptCursor(4, 2, seed=1).load_state_dict(state)
    assert [error.where for error in caught.value.errors] == places


def test_the_cursor_of_a_job_names_its_keys_and_what_the_run_was_begun_with():
    state = JobCursor("old.jsonl", 4, 2, seed=1).state_dict()
    with pytest.raises(DataError) as caught:
        JobCursor("new.jsonl", 5, 2, seed=3).load_state_dict(state)
    data, seed = map(str, caught.value.errors)
    what = "'new.jsonl' has 5 rows to train on, but the run began with 4 (of 'old.jsonl')"
    assert data == f"config.data.train: {what}: restore it, or start another run"
    assert seed == "config.seed: 3, but the run began with 1: restore it, or start another run"
    JobCursor("moved.jsonl", 4, 8, seed=1, total=9).load_state_dict(state)
    del state["source"]
    with pytest.raises(
        DataError, match="config.data.train: .* began with 4 .the file or its held-out part has changed"
    ):
        JobCursor("new.jsonl", 5, 2, seed=1).load_state_dict(state)


@pytest.mark.parametrize("arguments", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_sizes_are_refused(arguments):
    with pytest.raises(ValueError, match="need rows"):
        PromptCursor(*arguments)


@pytest.mark.feature(80)
def test_ten_rows_and_one_epoch_give_each_row_once():
    cursor = PromptCursor(10, 4, seed=2, total=10)
    batches = [cursor.next() for _ in range(4)]
    assert [len(batch) for batch in batches] == [4, 4, 2, 0]
    assert sorted(chain.from_iterable(batches)) == list(range(10))
    unbounded = PromptCursor(10, 4, seed=2)
    assert [unbounded.next(), unbounded.next()] == batches[:2]


def test_an_epoch_that_was_cut_short_goes_on_under_a_longer_total():
    cursor = PromptCursor(6, 4, total=6)
    first = [cursor.next(), cursor.next()]
    other = PromptCursor(6, 4, total=9)
    other.load_state_dict(cursor.state_dict())
    assert sorted(chain.from_iterable(first)) == list(range(6))
    assert [len(other.next()), len(other.next())] == [3, 0]
    with pytest.raises(ValueError, match="total must be at least 0, not -1"):
        PromptCursor(6, 4, total=-1)
