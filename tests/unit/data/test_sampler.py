# SPDX-License-Identifier: Apache-2.0
"""The position in the data; rows over ranks and back."""

import itertools
import json
import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.sampler import PromptCursor, gather_parts, largest_differencing, lightest_first, partition
from dlrover.python.rl.recipe.online.prompts import JobCursor
from dlrover.python.rl.trainer.shard import Shard, divide


@pytest.mark.feature(80)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 3))
def test_cursor_draws_every_row_once_an_epoch(rows, batch_size, seed):
    cursor = PromptCursor(rows, batch_size, seed)
    rows_drawn = list(chain.from_iterable(cursor.next() for _ in range(rows)))
    assert len(rows_drawn) == rows * batch_size
    for start in range(0, len(rows_drawn), rows):
        assert sorted(rows_drawn[start : start + rows]) == list(range(rows))
    assert cursor.epoch == batch_size


def test_cursor_order_depends_on_epoch_and_seed():
    cursor = PromptCursor(50, 50, seed=3)
    first, second = cursor.next(), cursor.next()
    assert first != second
    assert PromptCursor(8, 8, seed=0).next() == [6, 3, 5, 0, 7, 2, 1, 4]
    assert PromptCursor(50, 50, seed=3).next() == first
    assert PromptCursor(50, 50, seed=4).next() != first


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 12))
def test_cursor_continues_from_its_saved_state(rows, batch_size, steps):
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
def test_cursor_refuses_a_state_of_other_data(state, places):
    with pytest.raises(DataError, match="does not fit") as caught:
        PromptCursor(4, 2, seed=1).load_state_dict(state)
    assert [error.where for error in caught.value.errors] == places


def test_job_cursor_names_its_keys_and_the_first_values():
    state = JobCursor("old.jsonl", 4, 2, seed=1).state_dict()
    with pytest.raises(DataError) as caught:
        JobCursor("new.jsonl", 5, 2, seed=3).load_state_dict(state)
    data, seed = map(str, caught.value.errors)
    rows = "'new.jsonl' has 5 rows to train on, but the run began with 4 (of 'old.jsonl')"
    assert data == f"config.data.train: {rows}: restore it, or start another run"
    assert seed == "config.seed: 3, but the run began with 1: restore it, or start another run"
    JobCursor("moved.jsonl", 4, 8, seed=1, total=9).load_state_dict(state)
    del state["source"]
    with pytest.raises(DataError, match="train: .* began with 4 .the file or its held-out part has changed"):
        JobCursor("new.jsonl", 5, 2, seed=1).load_state_dict(state)


@pytest.mark.feature(80)
def test_cursor_of_one_epoch_ends():
    cursor = PromptCursor(10, 4, seed=2, total=10)
    batches = [cursor.next() for _ in range(4)]
    assert [len(batch) for batch in batches] == [4, 4, 2, 0]
    assert sorted(chain.from_iterable(batches)) == list(range(10))
    unbounded = PromptCursor(10, 4, seed=2)
    assert [unbounded.next(), unbounded.next()] == batches[:2]


def test_cursor_continues_under_a_longer_total():
    cursor = PromptCursor(6, 4, total=6)
    first = [cursor.next(), cursor.next()]
    other = PromptCursor(6, 4, total=9)
    other.load_state_dict(cursor.state_dict())
    assert sorted(chain.from_iterable(first)) == list(range(6))
    assert [len(other.next()), len(other.next())] == [3, 0]
    for arguments in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(ValueError, match="need rows"):
            PromptCursor(*arguments)
    with pytest.raises(ValueError, match="total must be at least 0, not -1"):
        PromptCursor(6, 4, total=-1)


LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def batch_of(rows):
    tokens = [[row] * (1 + row % 5) for row in range(rows)]
    ragged = Ragged.from_rows(tokens, dtype=np.int64)
    return Batch({"tokens": ragged, "id": np.arange(rows), "name": list(map(str, range(rows)))})


def sums(lengths, groups):
    return [sum(lengths[item] for item in group) for group in groups]


def dealt(batch, ranks, together=1):
    """The plan for ``batch``, and the parts of the ranks."""
    plan = partition(batch.ragged("tokens").lengths.tolist(), ranks, together)
    return plan, divide(Shard(batch, rows=plan), ranks, True, "batch")


def longest_first(lengths, count):
    return lightest_first(sorted(range(len(lengths)), key=lambda item: -lengths[item]), lengths, count)


@pytest.mark.feature(57)
@pytest.mark.parametrize("seed", range(20))
def test_partition_has_every_row_and_beats_longest_first(seed):
    chance = random.Random(seed)
    lengths = [chance.randint(1, 500) for _ in range(64)]
    plan = partition(lengths, 8)
    assert sorted(itertools.chain.from_iterable(plan)) == list(range(64))
    loads, greedy = sums(lengths, plan), sums(lengths, longest_first(lengths, 8))
    assert max(loads) <= max(greedy)
    assert max(loads) <= 1.005 * sum(lengths) / 8


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_differencing_is_near_the_best_division(lengths, count):
    rows = range(len(lengths))
    assert sorted(itertools.chain.from_iterable(largest_differencing(lengths, count))) == list(rows)
    ways = itertools.product(range(count), repeat=len(lengths))
    best = min(max(sum(lengths[row] for row in rows if way[row] == group) for group in range(count)) for way in ways)
    assert max(sums(lengths, partition(lengths, count))) <= best * 4 / 3


@pytest.mark.feature(60)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_partition_keeps_pairs_together(ranks):
    batch = batch_of(6)
    plan, parts = dealt(batch, ranks, together=2)
    for part in parts:
        rows = part.dense("id").tolist()
        assert all(row % 2 == 0 and rows[at + 1] == row + 1 for at, row in enumerate(rows) if at % 2 == 0)
    back = gather_parts(plan, parts)
    assert len(back) == 6
    assert back.objects("name") == list("012345")
    with pytest.raises(DataError, match="5 rows are not a multiple of 2"):
        partition([1] * 5, ranks, together=2)


@pytest.mark.feature(61)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_gather_parts_restores_the_order_of_rows(ranks):
    for rows in range(1, 41):
        batch = batch_of(rows)
        plan, parts = dealt(batch, ranks)
        assert len(parts) == ranks
        back = gather_parts(plan, parts)
        assert back.dense("id").tolist() == list(range(rows))
        assert back.objects("name") == batch.objects("name")
        assert [row.tolist() for row in back.ragged("tokens")] == [row.tolist() for row in batch.ragged("tokens")]


@pytest.mark.feature(62)
def test_gather_parts_refuses_parts_of_another_plan():
    (plan, _), (_, longer_parts) = dealt(batch_of(7), 3), dealt(batch_of(11), 3)
    with pytest.raises(DataError, match="came back with"):
        gather_parts(plan, longer_parts)


@pytest.mark.feature(63)
@given(LENGTHS, st.integers(1, 6), st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_partition_of_any_rows_is_whole_and_repeatable(lengths, ranks, together):
    lengths = lengths[: len(lengths) // together * together]
    plan = partition(lengths, ranks, together)
    assert len(plan) == ranks
    assert sorted(itertools.chain.from_iterable(plan)) == list(range(len(lengths)))
    assert plan == partition(lengths, ranks, together)
    assert sorted(map(len, partition([3, 3, 3, 3, 3], 4))) == [1, 1, 1, 2]


@pytest.mark.parametrize(("groups", "together"), [(0, 1), (2, 0)])
def test_partition_refuses_impossible_numbers(groups, together):
    with pytest.raises(ValueError, match="must be positive"):
        partition([1, 2], groups, together)
