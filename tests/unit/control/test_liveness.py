# SPDX-License-Identifier: Apache-2.0
"""Processes that hang, and workers that are slower than the others of their role."""

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.liveness import WINDOW_S, WINDOWS, Listening, Paces, Sign, Work, hangs, odd_one_out

LIMITS = {"ACTOR": 10.0, "trainer": 30.0}
LISTENING = Listening(beat_s=0.5, since_s=0.0)


def sign(name="ACTOR[0]", method="update", since_s=90.0, step=3, at_s=99.9):
    return Sign(ProcessId.parse(name), 1, method, since_s, step, at_s)


IMPATIENT = {"listening": Listening(beat_s=0.5, since_s=0.0, silence_s=5.0)}
LATE = {"listening": Listening(beat_s=0.5, since_s=95.0)}
CALL, SHORT = sign(since_s=80.0), {"limits": {"ACTOR": 0.1}}
WORKING = [sign(since_s=90.5), sign("ACTOR[1]", method="", since_s=0.0), sign("trainer", since_s=71.0)]
HANGS = {
    "work and idleness": (WORKING, {}, {}),
    "a long call": ([CALL, sign("ACTOR[1]")], {}, {"ACTOR[0]": "in update without progress for 19.9 s"}),
    "other limits": ([sign("trainer", since_s=75.0), sign("ROLLOUT[0]", since_s=0.0, at_s=0.0)], {}, {}),
    "the call of a silent process": ([sign(since_s=85.0, at_s=92.0)], {}, {}),
    "silence": ([sign(method="", at_s=89.0)], {}, {"ACTOR[0]": "no sign of life for 11.0 s"}),
    "less silence": ([sign(method="", at_s=91.0)], {}, {}),
    "a limit of silence": ([sign(at_s=94.0)], IMPATIENT, {"ACTOR[0]": "no sign of life for 6.0 s"}),
    "a limit of silence and a long call": ([sign(since_s=91.0, at_s=99.0)], IMPATIENT, {}),
    "less than three beats": ([sign(method="", at_s=98.6)], SHORT, {}),
    "three beats": ([sign(method="", at_s=98.4)], SHORT, {"ACTOR[0]": "no sign of life for 1.6 s"}),
    "silence before the listener": ([sign(method="", at_s=10.0)], LATE, {}),
    "silence after it": (
        [sign(method="", at_s=10.0)],
        {**LATE, "now_s": 106.0},
        {"ACTOR[0]": "no sign of life for 11.0 s"},
    ),
}


@pytest.mark.parametrize(("signs", "options", "expected"), HANGS.values(), ids=HANGS)
def test_hangs_are_long_calls_and_silent_processes(signs, options, expected):
    limits, listening = options.get("limits", LIMITS), options.get("listening", LISTENING)
    hanging = hangs(signs, limits, listening, options.get("now_s", 100.0))
    assert {str(hung.process_id): why for hung, why in hanging} == expected


# -- the odd one out --------------------------------------------------------------------------------------------------


def odd(*signs):
    return odd_one_out(signs, LISTENING, 100.0)


@pytest.mark.parametrize("signs", [[], [sign()], [sign(method="", step=-1), sign("ACTOR[1]", method="", step=-1)]])
def test_odd_one_out_of_none_one_or_idle_ranks_is_none(signs):
    assert odd(*signs) is None


ODD_RANKS = [
    ({"at_s": 80.0}, {"method": "other"}, "silent for 20.0 s while other ranks report"),
    ({"method": "", "step": -1}, {}, "idle while 2 of 3 ranks are in update of step 3"),
    ({"method": "save"}, {}, "in save of step 3 while 2 of 3 ranks are in update of step 3"),
    ({"step": 2}, {}, "in update of step 2 while 2 of 3 ranks are in update of step 3"),
    ({"since_s": 80.0}, {}, "in update without progress for 20.0 s, the longest"),
]


@pytest.mark.parametrize(("second", "third", "why"), ODD_RANKS)
def test_odd_one_out_is_the_rank_that_differs(second, third, why):
    culprit, why_odd = odd(sign("ACTOR[0]"), sign("ACTOR[1]", **second), sign("ACTOR[2]", **third))
    assert (str(culprit.process_id), why_odd) == ("ACTOR[1]", why)


def test_odd_one_out_of_several_is_furthest_behind():
    ahead = [sign(f"ACTOR[{rank}]") for rank in range(3)]
    assert odd(*ahead, sign("ACTOR[3]", step=2), sign("ACTOR[4]", step=1))[0].process_id == ProcessId("ACTOR", 4)


def test_when_all_are_silent_where_they_were_decides():
    silent = [sign(f"ACTOR[{rank}]", at_s=50.0) for rank in range(3)]
    assert odd(*silent, sign("ACTOR[3]", method="", step=-1, at_s=50.0))[0].process_id == ProcessId("ACTOR", 3)


# -- slow workers -----------------------------------------------------------------------------------------------------


class Role:
    """Workers that work at their own pace; ``paces_s`` are seconds for a unit."""

    def __init__(self, paces_s, role="ACTOR", factor=2.0):
        self.paces, self.paces_s = Paces(factor), list(paces_s)
        self.ids = [ProcessId(role, rank) for rank in range(len(self.paces_s))]
        self.done = [Work() for _ in self.ids]
        self.up = dict.fromkeys(self.ids, 1)

    def works(self, units=10, number=1):
        """Do some units each; return the slow ones."""
        for rank, process_id in enumerate(self.ids):
            done = self.done[rank]
            self.done[rank] = Work(done.units + units, done.busy_s + units * self.paces_s[rank])
            self.paces.note(process_id, self.up[process_id], self.done[rank])
        return [(str(slow.process_id), round(slow.ratio, 1)) for slow in self.paces.find(self.up)]


def slow_in(role, windows):
    return [slow for _ in range(windows) for slow in role.works()]


def test_slow_rank_is_found_once_with_its_ratio():
    role = Role([1.0, 1.0, 3.0, 1.1])
    assert slow_in(role, WINDOWS) == []  # the first heartbeat only begins a window
    assert role.works() == [("ACTOR[2]", 3.0)]
    assert slow_in(role, 10) == []


def test_slow_rank_after_fast_windows_is_found_again():
    role = Role([1.0, 3.0])
    assert len(slow_in(role, WINDOWS + 1)) == 1
    role.paces_s[1] = 1.0
    assert slow_in(role, 3) == []
    role.paces_s[1] = 3.0
    assert len(slow_in(role, WINDOWS)) == 1


def test_more_work_is_no_slowness():
    role = Role([1.0, 1.0])
    for turn in range(20):
        for rank, process_id in enumerate(role.ids):
            units = (turn + 1) * 10 * (1 + 9 * rank)
            role.paces.note(process_id, 1, Work(units, units * 1.0))
        assert role.paces.find(role.up) == []


@pytest.mark.parametrize("paces_s", [[9.0], [1.0, 1.9], [2.0, 2.0, 2.0]])
def test_rank_alone_or_little_slower_is_not_found(paces_s):
    assert slow_in(Role(paces_s), 20) == []


def test_short_work_says_nothing():
    assert slow_in(Role([WINDOW_S / 1e4, WINDOW_S / 1e3]), 20) == []


def test_slow_rank_in_new_process_counts_from_zero():
    role = Role([1.0, 3.0])
    slow_in(role, WINDOWS)
    role.up[role.ids[1]], role.done[1] = 2, Work()
    assert slow_in(role, WINDOWS) == []
    assert role.works() == [("ACTOR[1]", 3.0)]
