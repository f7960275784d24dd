# SPDX-License-Identifier: Apache-2.0
"""Groups under way: how many, who has them, and that none of them becomes too stale, whatever is fast or slow."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.engine.rollout.sampling import uniforms
from dlrover.python.rl.recipe.online.collector import StalenessTracker


class Rollouts:
    """Workers that begin what they have room for and complete what ``dice`` says; they hold what they are told to."""

    def __init__(self, tracker, dice, room):
        self.tracker, self.dice, self.room, self.version = tracker, dice, room, 0
        self.oldest = {}

    def draw(self, must_move):
        for member in range(self.tracker.members):
            groups = self.tracker.groups_of(member)
            self.oldest = {key: old for key, old in self.oldest.items() if key in self.tracker.open}
            running = [group for group in groups if group.started and not group.complete]
            for group in [group for group in groups if not group.started][: self.room - len(running)]:
                self.oldest[group.key] = self.version
                running.append(group)
            ended = [group for group in running if must_move or self.dice.draw(st.booleans())]
            for group in groups:
                complete = group.complete or group in ended
                begun = group.key in self.oldest
                self.tracker.update_status(group.key, begun, complete and begun, self.oldest.get(group.key, -1))
        self.tracker.assign_shares()

    def wait_for(self, count):
        for patience in range(100):
            self.draw(must_move=patience > 3)
            if (taken := self.tracker.take(count)) is not None:
                return taken
        raise AssertionError("waits for ever")


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 3),
    st.booleans(),
    st.data(),
)
@settings(deadline=None)
def test_no_step_gets_a_group_that_is_too_stale_and_none_waits_for_ever(
    per_step, max_staleness, members, room, steps, rows, resumes, dice
):
    tracker = StalenessTracker(per_step, max_staleness, members, rows)
    rollouts = Rollouts(tracker, dice, room)
    asked = 0
    for step in range(1, steps + 1):
        rollouts.version = step - dice.draw(st.integers(0, 1)) if step > 1 else 1  # a skipped step changes nothing
        rollouts.version = max(rollouts.version, *tracker._versions, 1)
        tracker.set_version(rollouts.version)
        kept = 0
        while kept < per_step:
            wanted = tracker.capacity(steps - step + 1, kept)
            assert wanted >= 0
            tracker.request(step, [(asked + more) % rows for more in range(wanted)])
            asked += wanted
            ids = [(group.prompt_id, group.retry) for group in tracker.open.values()]
            assert len(set(ids)) == len(ids)
            assert all(group.prompt_id % rows == group.row for group in tracker.open.values())
            taken = rollouts.wait_for(per_step - kept)
            assert len(taken) == per_step - kept
            assert max(tracker.staleness(group.min_version) for group in taken) <= max_staleness
            kept += sum(dice.draw(st.booleans()) for _ in taken[1:]) + 1  # the others are filtered out
        if resumes:
            saved = tracker.state_dict()
            tracker = StalenessTracker(per_step, max_staleness, members, rows)
            tracker.load_state_dict(saved)
            rollouts.tracker = tracker
    assert not tracker.open


def test_without_staleness_a_step_takes_all_that_it_has_asked_for_in_order():
    tracker = StalenessTracker(4, 0, 2, 100)
    tracker.set_version(3)
    tracker.request(7, [5, 9, 5, 2])
    assert [group.prompt_id for group in tracker.open.values()] == [5, 9, 105, 2]
    assert [[group.row for group in tracker.groups_of(member)] for member in (0, 1)] == [[5, 5], [9, 2]]
    for group in list(tracker.open.values())[:3]:
        tracker.update_status(group.key, True, True, 3)
    assert tracker.take(4) is None
    assert tracker.summary() == "ROLLOUT[0] has 2 of 2 groups, ROLLOUT[1] has 1 of 2 groups"
    tracker.update_status((2, 0, 7), True, True, 3)
    assert [group.prompt_id for group in tracker.take(4)] == [5, 9, 105, 2]
    assert tracker.capacity(1, collected=4) == 0


def test_a_slow_member_gives_what_it_has_not_begun_to_the_others():
    tracker = StalenessTracker(8, 0, 2, 100)
    tracker.request(1, range(8))
    assert [len(tracker.groups_of(member)) for member in (0, 1)] == [4, 4]
    for group in tracker.groups_of(0)[:1] + tracker.groups_of(1)[:1]:
        tracker.update_status(group.key, True, group.share == 1, 0)  # the fast one has completed its first
    tracker.assign_shares()
    assert [len([group for group in tracker.groups_of(member) if not group.complete]) for member in (0, 1)] == [4, 3]
    for group in tracker.groups_of(1):
        tracker.update_status(group.key, True, True, 0)
    tracker.assign_shares()
    assert len(tracker.groups_of(1)) >= 5


def test_what_has_to_go_now_is_waited_for():
    tracker = StalenessTracker(1, 1, 1, 100)
    tracker.set_version(1)
    tracker.request(1, [0, 1])
    tracker.update_status((0, 0, 1), True, False, 1)
    tracker.update_status((1, 0, 1), True, True, 1)
    assert [group.row for group in tracker.take(1)] == [1]
    tracker.set_version(2)
    tracker.request(2, [2])
    tracker.update_status((2, 0, 2), True, True, 2)
    assert tracker.take(1) is None, "the first group would be too stale in the next step"
    tracker.update_status((0, 0, 1), True, True, 1)
    assert [group.row for group in tracker.take(1)] == [0]


def test_a_run_that_went_back_counts_from_there():
    tracker = StalenessTracker(1, 2, 1, 100)
    for version in (1, 2, 3):
        tracker.set_version(version)
    assert [tracker.staleness(version) for version in (3, 2, 1, -1)] == [0, 1, 2, 0]
    tracker.set_version(2)
    assert [tracker.staleness(version) for version in (2, 1)] == [0, 1]
    for version in (3, 4, 5, 6):
        tracker.set_version(version)
    assert tracker.staleness(1) == 3
    assert tracker.staleness(2) > 2


def test_another_attempt_is_a_group_of_its_own_for_the_same_prompt():
    tracker = StalenessTracker(2, 0, 1, 100)
    tracker.request(4, [1, 2])
    for group in tracker.groups_of(0):
        tracker.update_status(group.key, True, True, 0)
    taken = tracker.take(2)
    tracker.retry(4, taken[:1])
    assert [group.key for group in tracker.open.values()] == [(1, 1, 4)]


def test_a_prompt_twice_in_a_step_is_sampled_anew_in_a_group_of_its_own():
    tracker = StalenessTracker(16, 0, 1, 8)
    tracker.request(1, [*range(8), *range(8)])
    ids = [group.prompt_id for group in tracker.open.values()]
    assert (ids, [group.row for group in tracker.open.values()]) == (list(range(16)), [*range(8), *range(8)])
    draws = {tuple(uniforms((0, 1), identity, sample, 4)) for identity in ids for sample in range(4)}
    assert len(draws) == 16 * 4


def test_what_a_step_has_taken_keeps_its_number_until_the_next_one():
    tracker = StalenessTracker(1, 0, 1, 8)
    tracker.request(1, [3])
    tracker.update_status((3, 0, 1), True, True, 0)
    tracker.take(1)
    tracker.request(1, [3])
    assert [group.prompt_id for group in tracker.open.values()] == [11]
    tracker.open.clear()
    tracker.begin_step()
    tracker.request(2, [3])
    assert [group.prompt_id for group in tracker.open.values()] == [3]


def test_a_run_that_goes_on_with_a_lower_bound_begins_what_is_open_step_by_step():
    before = StalenessTracker(2, 2, 1, 100)
    before.request(1, range(6))
    tracker = StalenessTracker(2, 0, 1, 100)
    tracker.load_state_dict(before.state_dict())
    for step, rows in ((1, [0, 1]), (2, [2, 3]), (3, [4, 5])):
        tracker.begin_step()
        tracker.set_version(step)
        assert tracker.capacity(9) <= 0
        assert [group.row for group in tracker.groups_of(0)] == rows
        for group in tracker.groups_of(0):
            tracker.update_status(group.key, True, True, step)
        assert [group.row for group in tracker.take(2)] == rows
    assert tracker.capacity(9) == 2


def test_a_trainer_that_goes_on_leaves_what_was_begun_where_it_is():
    before = StalenessTracker(2, 1, 2, 100)
    before.request(1, range(4))
    before.update_status((0, 0, 1), True, True, 0)
    before.update_status((2, 0, 1), True, False, 0)
    where = {group.row: group.share for group in before.open.values()}
    assert where[0] == where[2] == 0

    tracker = StalenessTracker(2, 1, 2, 100)
    tracker.load_state_dict(before.state_dict())
    tracker.assign_shares()
    assert {group.row: group.share for group in tracker.open.values() if group.started} == {0: 0, 2: 0}

    fewer = StalenessTracker(2, 1, 1, 100)
    fewer.load_state_dict(before.state_dict())
    fewer.assign_shares()
    assert {group.share for group in fewer.open.values()} == {0}


def test_with_fewer_members_each_has_its_shares_one_after_the_other_as_the_missing_ones_would():
    whole, fewer = StalenessTracker(6, 0, 3, 100), StalenessTracker(6, 0, 2, 100, shares=3)
    for tracker in (whole, fewer):
        tracker.request(1, range(6))
    shares = [whole.groups_of(member) for member in range(3)]
    rows = [[group.row for group in share] for share in shares]
    assert [[group.row for group in fewer.groups_of(member)] for member in (0, 1)] == rows[:2]
    for group in fewer.groups_of(0):
        fewer.update_status(group.key, True, True, 1)
    assert [group.row for group in fewer.groups_of(0)] == rows[0] + rows[2]
    for group in fewer.open.values():
        fewer.update_status(group.key, True, True, 1)
    assert [group.row for group in fewer.take(6)] == list(range(6))


def test_what_a_lost_member_had_begun_is_begun_elsewhere():
    before = StalenessTracker(2, 1, 2, 100)
    before.request(1, range(4))
    before.update_status((1, 0, 1), True, False, 0)
    assert before.open[1, 0, 1].share == 1

    tracker = StalenessTracker(2, 1, 1, 100)
    tracker.load_state_dict(before.state_dict())
    assert not tracker.open[1, 0, 1].started
