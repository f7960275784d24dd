# SPDX-License-Identifier: Apache-2.0
import pytest

from dlrover.python.rl.runtime.checkpoint.cadence import Cadence
from dlrover.python.rl.runtime.checkpoint.storage.state_file import StateFile
from tests.manual_clock import ManualClock


def states_at(cadence, clock, state_s, step_s, state_bytes=1000, call_bytes=1, commits=60):
    """The numbers of the commits that have the states."""
    at = []
    for number in range(commits):
        whole = number == 0 or cadence.is_due()
        at += [number] if whole else []
        clock.advance(step_s)
        file = StateFile("file", state_bytes if whole else call_bytes, 0)
        cadence.note([file], state_s if whole else 0.0, whole)
    return at


@pytest.mark.parametrize(
    ("state_s", "step_s", "apart"), [(0.001, 1.0, 1), (0.005, 1.0, 1), (0.015, 1.0, 3), (0.034, 1.0, 7), (0.5, 1.0, 8)]
)
def test_states_take_half_a_percent_of_the_time_or_come_at_every_eighth_step(state_s, step_s, apart):
    clock = ManualClock()
    at = states_at(Cadence(now_s=clock), clock, state_s, step_s)
    assert {later - earlier for earlier, later in zip(at[2:], at[3:], strict=False)} == {apart}


def test_before_anything_is_measured_states_are_apart():
    cadence = Cadence(now_s=ManualClock())
    cadence.note([StateFile("file", 1000, 0)], 0.0, whole=True)
    assert not cadence.is_due()


def test_calls_that_take_more_room_than_the_states_are_not_gathered():
    clock = ManualClock()
    at = states_at(Cadence(now_s=clock), clock, 0.5, 1.0, state_bytes=1000, call_bytes=300)
    assert {later - earlier for earlier, later in zip(at, at[1:], strict=False)} == {4}


@pytest.mark.parametrize("every", [1, 3])
def test_a_number_is_kept_to(every):
    clock = ManualClock()
    assert states_at(Cadence(every, clock), clock, 0.5, 1.0, commits=10) == list(range(0, 10, every))
