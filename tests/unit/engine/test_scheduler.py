# SPDX-License-Identifier: Apache-2.0
"""Who decodes in which row."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.engine.rollout_torch.batch import ADMIT_SHARE, Scheduler
from dlrover.python.rl.engine.rollout_torch.decoder import ROW_GROUP


def test_requests_are_active_in_order_and_a_free_row_is_taken_at_once():
    scheduler = Scheduler(3)
    assert not scheduler.waiting
    scheduler.add(range(5))
    assert scheduler.waiting
    assert scheduler.admit() == [0, 1, 2]
    assert scheduler.admit() == []
    assert scheduler.remove({1}) == [0, 2]
    assert scheduler.active == [0, 2]
    assert scheduler.waiting[0] == 3
    assert scheduler.admit() == [3]
    assert scheduler.active == [0, 2, 3]


def test_of_many_rows_several_are_active_together():
    scheduler = Scheduler(4 * ADMIT_SHARE)
    scheduler.add(range(4 * ADMIT_SHARE + 5))
    scheduler.admit()
    scheduler.remove({0, 1, 2})
    assert scheduler.admit() == []
    scheduler.remove({3})
    assert scheduler.admit() == [64, 65, 66, 67]
    scheduler.remove({4})
    assert scheduler.admit() == [68], "no other request waits"


def test_a_hole_in_the_last_group_is_filled_by_the_last_row_and_the_others_stay():
    scheduler = Scheduler(6)
    scheduler.add(range(6))
    scheduler.admit()
    assert scheduler.remove({1, 4}) == [0, 5, 2, 3]
    assert scheduler.active == [0, 5, 2, 3]


def test_a_hole_in_a_group_is_filled_by_the_oldest_of_the_next_and_so_on():
    scheduler = Scheduler(3 * ROW_GROUP)
    scheduler.add(range(3 * ROW_GROUP))
    scheduler.admit()
    order = scheduler.remove({3})
    moved = {3: ROW_GROUP, ROW_GROUP: 2 * ROW_GROUP, 2 * ROW_GROUP: 3 * ROW_GROUP - 1}
    assert order == [moved.get(row, row) for row in range(3 * ROW_GROUP - 1)]


def test_groups_stay_in_the_order_of_age():
    scheduler, number, generator = Scheduler(4 * ROW_GROUP), 0, random.Random(0)
    for _ in range(300):
        scheduler.add(range(number, number + 3))
        number += 3
        scheduler.admit()
        scheduler.remove(generator.sample(scheduler.active, min(2, len(scheduler.active))))
        groups = [scheduler.active[start : start + ROW_GROUP] for start in range(0, len(scheduler.active), ROW_GROUP)]
        inversions = sum(
            min(newer) < max(older) - 2 * ROW_GROUP for older, newer in zip(groups, groups[1:], strict=False)
        )
        assert inversions == 0


def test_requeued_requests_come_before_those_that_waited():
    scheduler = Scheduler(2)
    scheduler.add(range(4))
    scheduler.admit()
    scheduler.remove({0})
    scheduler.admit()
    scheduler.requeue()
    assert (scheduler.active, list(scheduler.waiting)) == ([], [1, 2, 3])
    scheduler.rows = 1
    assert scheduler.admit() == [1]


class Cache:
    """Rows that remember who was put there."""

    def __init__(self):
        self.rows = []

    def keep(self, rows):
        for row, old in enumerate(rows):
            self.rows[row] = self.rows[old]
        del self.rows[len(rows) :]


@given(
    st.integers(1, 80), st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 30)), st.booleans()), max_size=25)
)
def test_the_cache_always_holds_the_active_requests_and_none_is_lost(rows, steps):
    scheduler, cache, running, number = Scheduler(rows), Cache(), set(), 0
    for added, ended, requeued in steps:
        fresh = range(number, number + added)
        number += added
        running.update(fresh)
        scheduler.add(fresh)
        cache.rows += scheduler.admit()
        assert 0 <= min(rows, len(running)) - len(cache.rows) < max(1, rows // ADMIT_SHARE)
        cache.keep(scheduler.remove(ended & running))
        running -= ended
        if requeued:
            scheduler.requeue()
            cache.rows = []
        assert cache.rows == scheduler.active
        assert sorted([*scheduler.active, *scheduler.waiting]) == sorted(running)
        assert list(scheduler.waiting) == sorted(scheduler.waiting)


@pytest.mark.parametrize("rows", [1, 3])
def test_ending_those_that_wait_moves_no_row(rows):
    scheduler = Scheduler(rows)
    scheduler.add(range(5))
    scheduler.admit()
    assert scheduler.remove({4}) == list(range(rows))
