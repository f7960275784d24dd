# SPDX-License-Identifier: Apache-2.0
"""Finds processes without progress, and slow workers, by their heartbeats. All times are monotonic seconds.

A **unit** of work is a token step, a micro-batch or a tensor, or a whole call without any. The time after a call's last
unit does not count, since ranks may wait for each other in it. A **window** of a role ends when each of its workers has
worked for some seconds in it. A worker is slow if, in several windows in a row, it needs ``factor`` times as long for a
unit as the median of the others."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from dlrover.python.rl.common.names import ProcessId

MIN_SILENT_BEATS = 3
"""Heartbeats that may be late or lost before silence means anything."""


@dataclass(frozen=True)
class Sign:
    """The last heartbeat of a process."""

    process_id: ProcessId
    number: int  # its incarnation or epoch
    method: str  # the call it is in, "" when it is idle or waits for others
    since_s: float  # the start or last progress of the call, in the listener's time
    step: int  # of that call, -1 for none
    at_s: float  # when the heartbeat arrived


Hang: TypeAlias = tuple[Sign, str]
"""The last heartbeat of a process that hangs, and why it is treated as hung."""


@dataclass(frozen=True)
class Listening:
    """The settings of the listener. After the listener itself was paused, silence counts from ``since_s``."""

    beat_s: float  # between two heartbeats of a process
    since_s: float  # it has listened without a gap since then
    silence_s: float = math.inf  # a process that is silent for longer is hung, however long its calls may take


def hangs(
    signs: Iterable[Sign], hang_after_s: Mapping[str, float], listening: Listening, now_s: float
) -> tuple[Hang, ...]:
    """Return the hung processes among ``signs``, the newest heartbeat of each process that is up. ``hang_after_s`` maps
    the pool of a process id to its longest time without progress; other pools have no limit."""
    hanging = []
    for sign in signs:
        limit_s = hang_after_s.get(sign.process_id.pool)
        if limit_s is None:
            continue
        silent_s = now_s - max(sign.at_s, listening.since_s)
        # As of the last heartbeat: a process that has been silent since may have left its call.
        age_s = sign.at_s - sign.since_s
        if silent_s > max(min(limit_s, listening.silence_s), MIN_SILENT_BEATS * listening.beat_s):
            hanging.append((sign, f"no sign of life for {silent_s:.1f} s"))
        elif sign.method and age_s > limit_s:
            hanging.append((sign, f"in {sign.method} without progress for {age_s:.1f} s"))
    return tuple(hanging)


def odd_one_out(signs: Sequence[Sign], listening: Listening, now_s: float) -> Hang | None:
    """Return the rank that the others most likely wait for; None for a single rank.

    It is, in this order: one that is silent while another is not; one in another call than most; the one whose last
    progress is the longest ago."""
    if len(signs) < 2:
        return None
    allowed_s = MIN_SILENT_BEATS * listening.beat_s
    silent_s = [now_s - max(sign.at_s, listening.since_s) for sign in signs]
    if min(silent_s) <= allowed_s < max(silent_s):
        quietest = signs[silent_s.index(max(silent_s))]
        return quietest, f"silent for {max(silent_s):.1f} s while other ranks report"
    (usual, count), *_ = Counter((sign.method, sign.step) for sign in signs).most_common(1)
    elsewhere = [sign for sign in signs if (sign.method, sign.step) != usual]
    if elsewhere and 2 * count > len(signs):
        # The others wait for the one that is furthest behind.
        odd = min(elsewhere, key=lambda sign: (sign.step, sign.method))
        where = f"in {odd.method} of step {odd.step}" if odd.method else "idle"
        majority = f"{count} of {len(signs)} ranks are in {usual[0] or 'no call'} of step {usual[1]}"
        return odd, f"{where} while {majority}"
    busy = [sign for sign in signs if sign.method]
    if not busy:
        return None
    odd = min(busy, key=lambda sign: sign.since_s)
    return odd, f"in {odd.method} without progress for {now_s - odd.since_s:.1f} s, the longest"


WINDOW_S = 5.0
WINDOWS = 3


@dataclass(frozen=True)
class Work:
    """The units of work of a process so far, and the seconds that they took."""

    units: int = 0
    busy_s: float = 0.0


@dataclass
class MemberPace:
    """The pace of a worker in this window: it needs ``ratio`` times as long for a unit as the others of its role."""

    process_id: ProcessId
    number: int
    before: Work  # at the start of the window
    now: Work
    windows: int = 0  # consecutive ones in which it was slow
    ratio: float = 1.0

    def __str__(self) -> str:
        return f"{self.process_id} works {self.ratio:.1f} times slower than the others of its role"


@dataclass
class Paces:
    """The paces of all workers of a job."""

    factor: float
    _members: dict[ProcessId, MemberPace] = field(default_factory=dict)

    def note(self, process_id: ProcessId, number: int, work: Work) -> None:
        member = self._members.get(process_id)
        if member is None or member.number != number:
            self._members[process_id] = MemberPace(process_id, number, work, work)
        else:
            member.now = work

    def find(self, up: Mapping[ProcessId, int]) -> list[MemberPace]:
        """Return the workers that became slow in a window that has just ended; ``up`` maps the running ones to their
        numbers."""
        self._members = {key: member for key, member in self._members.items() if up.get(key) == member.number}
        slow = []
        for pool in dict.fromkeys(process_id.pool for process_id in self._members):
            role = {process_id: member for process_id, member in self._members.items() if process_id.pool == pool}
            worked_s = [member.now.busy_s - member.before.busy_s for member in role.values()]
            if len(role) < 2 or min(worked_s) < WINDOW_S:
                continue
            units = [max(member.now.units - member.before.units, 1) for member in role.values()]
            paces_s = {key: busy_s / count for key, busy_s, count in zip(role, worked_s, units, strict=True)}
            for process_id, member in role.items():
                others_s = median(pace_s for other, pace_s in paces_s.items() if other != process_id)
                member.ratio = paces_s[process_id] / others_s if others_s else 1.0
                member.windows = member.windows + 1 if member.ratio > self.factor else 0
                member.before = member.now
                if member.windows == WINDOWS:
                    slow.append(member)
        return slow
