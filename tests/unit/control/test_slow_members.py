# SPDX-License-Identifier: Apache-2.0
"""Workers that are slower than the others of their role, and those that only have more to do."""

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.liveness import WINDOW_S, WINDOWS, Paces, Work


class Role:
    """Workers that work at their own pace; ``paces_s`` are seconds for a unit."""

    def __init__(self, paces_s, role="ACTOR", factor=2.0):
        self.paces, self.paces_s = Paces(factor), list(paces_s)
        self.ids = [ProcessId(role, rank) for rank in range(len(self.paces_s))]
        self.done = [Work() for _ in self.ids]
        self.up = dict.fromkeys(self.ids, 1)

    def works(self, units=10, number=1):
        """Some units each; who is found to be slow."""
        for rank, process_id in enumerate(self.ids):
            done = self.done[rank]
            self.done[rank] = Work(done.units + units, done.busy_s + units * self.paces_s[rank])
            self.paces.note(process_id, self.up[process_id], self.done[rank])
        return [(str(slow.process_id), round(slow.ratio, 1)) for slow in self.paces.find(self.up)]


def found(role, windows):
    return [slow for _ in range(windows) for slow in role.works()]


def test_a_rank_that_is_slower_in_several_windows_is_named_once_with_how_much():
    role = Role([1.0, 1.0, 3.0, 1.1])
    assert found(role, WINDOWS) == []  # the first heartbeat only begins a window
    assert role.works() == [("ACTOR[2]", 3.0)]
    assert found(role, 10) == []


def test_it_is_named_again_after_it_was_as_fast_as_the_others_for_a_while():
    role = Role([1.0, 3.0])
    assert len(found(role, WINDOWS + 1)) == 1
    role.paces_s[1] = 1.0
    assert found(role, 3) == []
    role.paces_s[1] = 3.0
    assert len(found(role, WINDOWS)) == 1


def test_more_work_is_no_slowness():
    role = Role([1.0, 1.0])
    for turn in range(20):
        for rank, process_id in enumerate(role.ids):
            units = (turn + 1) * 10 * (1 + 9 * rank)
            role.paces.note(process_id, 1, Work(units, units * 1.0))
        assert role.paces.find(role.up) == []


@pytest.mark.parametrize("paces_s", [[9.0], [1.0, 1.9], [2.0, 2.0, 2.0]])
def test_who_is_alone_or_not_much_slower_is_not_named(paces_s):
    assert found(Role(paces_s), 20) == []


def test_short_work_says_nothing():
    assert found(Role([WINDOW_S / 1e4, WINDOW_S / 1e3]), 20) == []


def test_a_new_process_begins_anew():
    role = Role([1.0, 3.0])
    found(role, WINDOWS)
    role.up[role.ids[1]], role.done[1] = 2, Work()
    assert found(role, WINDOWS) == []
    assert role.works() == [("ACTOR[1]", 3.0)]
