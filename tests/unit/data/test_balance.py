# SPDX-License-Identifier: Apache-2.0
"""Rows over ranks and back, as a trainer divides them."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.sampler import gather_parts, largest_differencing, lightest_first, partition
from dlrover.python.rl.trainer.shard import Shard, divide

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def batch_of(rows):
    tokens = [[row] * (1 + row % 5) for row in range(rows)]
    columns = {
        "tokens": Ragged.from_rows(tokens, dtype=np.int64),
        "id": np.arange(rows),
        "name": list(map(str, range(rows))),
    }
    return Batch(columns)


def sums(lengths, groups):
    return [sum(lengths[item] for item in group) for group in groups]


def dealt(batch, ranks, together=1):
    """How ``batch`` is divided, and what each rank gets."""
    plan = partition(batch.ragged("tokens").lengths.tolist(), ranks, together)
    return plan, divide(Shard(batch, rows=plan), ranks, True, "batch")


def longest_first(lengths, count):
    return lightest_first(sorted(range(len(lengths)), key=lambda item: -lengths[item]), lengths, count)


@pytest.mark.feature(57)
@pytest.mark.parametrize("seed", range(20))
def test_ranks_have_every_row_once_and_no_more_tokens_than_longest_first(seed):
    chance = random.Random(seed)
    lengths = [chance.randint(1, 500) for _ in range(64)]
    found = partition(lengths, 8)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(64))
    loads, greedy = sums(lengths, found), sums(lengths, longest_first(lengths, 8))
    assert max(loads) <= max(greedy)
    assert max(loads) <= 1.005 * sum(lengths) / 8


@pytest.mark.feature(57)
def test_differencing_is_better_than_greedy_where_that_is_known():
    lengths = [8, 7, 6, 5, 4]
    assert sorted(sums(lengths, largest_differencing(lengths, 2))) == [14, 16]
    assert sorted(sums(lengths, longest_first(lengths, 2))) == [13, 17]
    # By hand: 8|7|0 of the first two; 8|7|6 with the third; 5|4|0 of the others; 8+0|7+4|6+5 of both.
    assert sorted(sums(lengths, largest_differencing(lengths, 3))) == [8, 11, 11]


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_differencing_is_near_the_best_division_there_is(lengths, count):
    rows = range(len(lengths))
    assert sorted(itertools.chain.from_iterable(largest_differencing(lengths, count))) == list(rows)
    ways = itertools.product(range(count), repeat=len(lengths))
    best = min(max(sum(lengths[row] for row in rows if way[row] == group) for group in range(count)) for way in ways)
    assert max(sums(lengths, partition(lengths, count))) <= best * 4 / 3


@pytest.mark.feature(60)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_three_pairs_come_back_in_order(ranks):
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
def test_every_number_of_rows_comes_back_in_order(ranks):
    for rows in range(1, 41):
        batch = batch_of(rows)
        plan, parts = dealt(batch, ranks)
        assert len(parts) == ranks
        back = gather_parts(plan, parts)
        assert back.dense("id").tolist() == list(range(rows))
        assert back.objects("name") == batch.objects("name")
        assert [row.tolist() for row in back.ragged("tokens")] == [row.tolist() for row in batch.ragged("tokens")]


@pytest.mark.feature(62)
def test_two_divisions_at_a_time_know_nothing_of_each_other():
    (first, parts_of_one), (second, parts_of_two) = dealt(batch_of(7), 3), dealt(batch_of(11), 3)
    assert gather_parts(first, parts_of_one).dense("id").tolist() == list(range(7))
    assert gather_parts(second, parts_of_two).dense("id").tolist() == list(range(11))
    with pytest.raises(DataError, match="came back with"):
        gather_parts(first, parts_of_two)


@pytest.mark.feature(63)
def test_five_rows_in_four_updates_are_each_used_once():
    plan = partition([3, 3, 3, 3, 3], 4)
    assert sorted(map(len, plan)) == [1, 1, 1, 2]
    assert sorted(itertools.chain.from_iterable(plan)) == [0, 1, 2, 3, 4]


@given(LENGTHS, st.integers(1, 6), st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_any_rows_over_any_ranks(lengths, ranks, together):
    lengths = lengths[: len(lengths) // together * together]
    plan = partition(lengths, ranks, together)
    assert len(plan) == ranks
    assert sorted(itertools.chain.from_iterable(plan)) == list(range(len(lengths)))
    assert plan == partition(lengths, ranks, together)


def test_four_thousand_rows_are_divided_in_a_moment():
    chance = random.Random(0)
    lengths = [chance.randint(1, 4096) for _ in range(4096)]
    loads = sums(lengths, partition(lengths, 64))
    assert max(loads) - min(loads) <= 8


@pytest.mark.parametrize(("groups", "together"), [(0, 1), (2, 0)])
def test_impossible_numbers_are_refused(groups, together):
    with pytest.raises(ValueError, match="must be positive"):
        partition([1, 2], groups, together)


def test_no_rows_at_all():
    assert partition([], 2) == ((), ())
