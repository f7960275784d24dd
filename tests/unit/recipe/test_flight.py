"""Groups under way: how many, who has them, and that none of them becomes too stale, whatever is fast or slow."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.engine.torch.sampling import uniforms
from dlrover.python.rl.recipe.flight import Flight


class Rollouts:
    """Members that begin what they have room for and complete what ``dice`` says; they hold what they are told to."""

    def __init__(self, flight, dice, room):
        self.flight, self.dice, self.room, self.version = flight, dice, room, 0
        self.oldest = {}

    def draw(self, must_move):
        for member in range(self.flight.members):
            groups = self.flight.of(member)
            self.oldest = {key: old for key, old in self.oldest.items() if key in self.flight.open}
            running = [group for group in groups if group.begun and not group.complete]
            for group in [group for group in groups if not group.begun][: self.room - len(running)]:
                self.oldest[group.key] = self.version
                running.append(group)
            ended = [group for group in running if must_move or self.dice.draw(st.booleans())]
            for group in groups:
                complete = group.complete or group in ended
                begun = group.key in self.oldest
                self.flight.heard(group.key, begun, complete and begun, self.oldest.get(group.key, -1))
        self.flight.spread()

    def wait_for(self, count):
        for patience in range(100):
            self.draw(must_move=patience > 3)
            if (taken := self.flight.take(count)) is not None:
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
    flight = Flight(per_step, max_staleness, members, rows)
    rollouts = Rollouts(flight, dice, room)
    asked = 0
    for step in range(1, steps + 1):
        rollouts.version = step - dice.draw(st.integers(0, 1)) if step > 1 else 1  # a skipped step changes nothing
        rollouts.version = max(rollouts.version, *flight._served, 1)
        flight.serves(rollouts.version)
        kept = 0
        while kept < per_step:
            wanted = flight.room(steps - step + 1, kept)
            assert wanted >= 0
            flight.ask(step, [(asked + more) % rows for more in range(wanted)])
            asked += wanted
            ids = [(group.prompt_id, group.attempt) for group in flight.open.values()]
            assert len(set(ids)) == len(ids)
            assert all(group.prompt_id % rows == group.row for group in flight.open.values())
            taken = rollouts.wait_for(per_step - kept)
            assert len(taken) == per_step - kept
            assert max(flight.staleness(group.oldest) for group in taken) <= max_staleness
            kept += sum(dice.draw(st.booleans()) for _ in taken[1:]) + 1  # the others are filtered out
        if resumes:
            saved = flight.state_dict()
            flight = Flight(per_step, max_staleness, members, rows)
            flight.load_state_dict(saved)
            rollouts.flight = flight
    assert not flight.open


def test_without_staleness_a_step_takes_all_that_it_has_asked_for_in_order():
    flight = Flight(4, 0, 2, 100)
    flight.serves(3)
    flight.ask(7, [5, 9, 5, 2])
    assert [group.prompt_id for group in flight.open.values()] == [5, 9, 105, 2]
    assert [[group.row for group in flight.of(member)] for member in (0, 1)] == [[5, 5], [9, 2]]
    for group in list(flight.open.values())[:3]:
        flight.heard(group.key, True, True, 3)
    assert flight.take(4) is None
    assert flight.told() == "ROLLOUT[0] has 2 of 2 groups, ROLLOUT[1] has 1 of 2 groups"
    flight.heard((2, 0, 7), True, True, 3)
    assert [group.prompt_id for group in flight.take(4)] == [5, 9, 105, 2]
    assert flight.room(1, kept=4) == 0


def test_a_slow_member_gives_what_it_has_not_begun_to_the_others():
    flight = Flight(8, 0, 2, 100)
    flight.ask(1, range(8))
    assert [len(flight.of(member)) for member in (0, 1)] == [4, 4]
    for group in flight.of(0)[:1] + flight.of(1)[:1]:
        flight.heard(group.key, True, group.member == 1, 0)  # the fast one has completed its first
    flight.spread()
    assert [len([group for group in flight.of(member) if not group.complete]) for member in (0, 1)] == [4, 3]
    for group in flight.of(1):
        flight.heard(group.key, True, True, 0)
    flight.spread()
    assert len(flight.of(1)) >= 5


def test_what_has_to_go_now_is_waited_for():
    flight = Flight(1, 1, 1, 100)
    flight.serves(1)
    flight.ask(1, [0, 1])
    flight.heard((0, 0, 1), True, False, 1)
    flight.heard((1, 0, 1), True, True, 1)
    assert [group.row for group in flight.take(1)] == [1]
    flight.serves(2)
    flight.ask(2, [2])
    flight.heard((2, 0, 2), True, True, 2)
    assert flight.take(1) is None, "the first group would be too stale in the next step"
    flight.heard((0, 0, 1), True, True, 1)
    assert [group.row for group in flight.take(1)] == [0]


def test_a_run_that_went_back_counts_from_there():
    flight = Flight(1, 2, 1, 100)
    for version in (1, 2, 3):
        flight.serves(version)
    assert [flight.staleness(version) for version in (3, 2, 1, -1)] == [0, 1, 2, 0]
    flight.serves(2)
    assert [flight.staleness(version) for version in (2, 1)] == [0, 1]
    for version in (3, 4, 5, 6):
        flight.serves(version)
    assert flight.staleness(1) == 3
    assert flight.staleness(2) > 2


def test_another_attempt_is_a_group_of_its_own_for_the_same_prompt():
    flight = Flight(2, 0, 1, 100)
    flight.ask(4, [1, 2])
    for group in flight.of(0):
        flight.heard(group.key, True, True, 0)
    taken = flight.take(2)
    flight.ask_again(4, taken[:1])
    assert [group.key for group in flight.open.values()] == [(1, 1, 4)]


def test_a_prompt_twice_in_a_step_is_sampled_anew_in_a_group_of_its_own():
    flight = Flight(16, 0, 1, 8)
    flight.ask(1, [*range(8), *range(8)])
    ids = [group.prompt_id for group in flight.open.values()]
    assert (ids, [group.row for group in flight.open.values()]) == (list(range(16)), [*range(8), *range(8)])
    draws = {tuple(uniforms((0, 1), identity, sample, 4)) for identity in ids for sample in range(4)}
    assert len(draws) == 16 * 4


def test_what_a_step_has_taken_keeps_its_number_until_the_next_one():
    flight = Flight(1, 0, 1, 8)
    flight.ask(1, [3])
    flight.heard((3, 0, 1), True, True, 0)
    flight.take(1)
    flight.ask(1, [3])
    assert [group.prompt_id for group in flight.open.values()] == [11]
    flight.open.clear()
    flight.begin()
    flight.ask(2, [3])
    assert [group.prompt_id for group in flight.open.values()] == [3]


def test_a_run_that_goes_on_with_a_lower_bound_begins_what_is_open_step_by_step():
    before = Flight(2, 2, 1, 100)
    before.ask(1, range(6))
    flight = Flight(2, 0, 1, 100)
    flight.load_state_dict(before.state_dict())
    for step, rows in ((1, [0, 1]), (2, [2, 3]), (3, [4, 5])):
        flight.begin()
        flight.serves(step)
        assert flight.room(9) <= 0
        assert [group.row for group in flight.of(0)] == rows
        for group in flight.of(0):
            flight.heard(group.key, True, True, step)
        assert [group.row for group in flight.take(2)] == rows
    assert flight.room(9) == 2


def test_a_trainer_that_goes_on_leaves_what_was_begun_where_it_is():
    before = Flight(2, 1, 2, 100)
    before.ask(1, range(4))
    before.heard((0, 0, 1), True, True, 0)
    before.heard((2, 0, 1), True, False, 0)
    where = {group.row: group.member for group in before.open.values()}
    assert where[0] == where[2] == 0

    flight = Flight(2, 1, 2, 100)
    flight.load_state_dict(before.state_dict())
    flight.spread()
    assert {group.row: group.member for group in flight.open.values() if group.begun} == {0: 0, 2: 0}

    fewer = Flight(2, 1, 1, 100)
    fewer.load_state_dict(before.state_dict())
    fewer.spread()
    assert {group.member for group in fewer.open.values()} == {0}


def test_what_a_lost_member_had_begun_is_begun_elsewhere():
    before = Flight(2, 1, 2, 100)
    before.ask(1, range(4))
    before.heard((1, 0, 1), True, False, 0)
    assert before.open[1, 0, 1].member == 1

    flight = Flight(2, 1, 1, 100)
    flight.load_state_dict(before.state_dict())
    assert not flight.open[1, 0, 1].begun
