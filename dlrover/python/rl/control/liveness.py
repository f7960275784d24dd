"""Who makes no progress: decided from what the processes last said of themselves. All times are monotonic seconds."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MIN_SILENT_BEATS = 3
"""So many beats may be late or lost before silence says anything."""


@dataclass(frozen=True)
class Sign:
    """What a process last said of itself.

    Attributes:
        who: ``"ROLLOUT[1]"`` or ``"trainer"``.
        number: its incarnation or epoch.
        method: the call it was in, ``""`` when it was idle or waited for others.
        since_s: when that call began, in the listener's time.
        step: the step the call belonged to, -1 for none.
        at_s: when the beat arrived.
    """

    who: str
    number: int
    method: str
    since_s: float
    step: int
    at_s: float

    @property
    def role(self) -> str:
        """``"ROLLOUT"`` for ``"ROLLOUT[1]"``; ``"trainer"`` stays."""
        return self.who.partition("[")[0]


@dataclass(frozen=True)
class Hang:
    """A process that makes no progress, and how that shows."""

    sign: Sign
    why: str


@dataclass(frozen=True)
class Listening:
    """How the listener listens.

    Attributes:
        beat_s: time between two beats of a process.
        since_s: since when it has listened without a gap. One that was itself stopped has heard nothing meanwhile:
            silence counts from here.
        silence_s: a process that says nothing for so long hangs, whatever its calls may take.
    """

    beat_s: float
    since_s: float
    silence_s: float = math.inf


def hangs(
    signs: Iterable[Sign], hang_after_s: Mapping[str, float], listening: Listening, now_s: float
) -> tuple[Hang, ...]:
    """Those of ``signs`` that come from a process which hangs, with the reason.

    Args:
        signs: the newest sign of each process that is up.
        hang_after_s: role or ``"trainer"`` to the longest time without progress; one that is not named has no limit.
        listening: since when there was somebody to hear a beat.
        now_s: the time.
    """
    found = []
    for sign in signs:
        limit_s = hang_after_s.get(sign.role)
        why = _why(sign, limit_s, listening, now_s) if limit_s is not None else ""
        if why:
            found.append(Hang(sign, why))
    return tuple(found)


def _why(sign: Sign, limit_s: float, listening: Listening, now_s: float) -> str:
    silent_s = now_s - max(sign.at_s, listening.since_s)
    if silent_s > max(min(limit_s, listening.silence_s), MIN_SILENT_BEATS * listening.beat_s):
        return f"no sign of life for {silent_s:.1f} s"
    # The call's age as last told: a process that went silent in its call may have left it since.
    age_s = sign.at_s - sign.since_s
    if sign.method and age_s > limit_s:
        return f"in {sign.method} for {age_s:.1f} s"
    return ""


@dataclass(frozen=True)
class Odd:
    """The one of a role that is not where the others are, and how that shows."""

    who: str
    why: str


def odd_one_out(signs: Sequence[Sign], listening: Listening, now_s: float) -> Odd | None:
    """The rank that the others most likely wait for; None when there is nothing to compare.

    In this order: one that is silent while another is heard; one in another call than most; the one that is in its call
    for the longest.
    """
    if len(signs) < 2:
        return None
    return _silent(signs, listening, now_s) or _elsewhere(signs) or _longest(signs, now_s)


def _silent(signs: Sequence[Sign], listening: Listening, now_s: float) -> Odd | None:
    allowed_s = MIN_SILENT_BEATS * listening.beat_s
    silent_s = {sign.who: now_s - max(sign.at_s, listening.since_s) for sign in signs}
    who = max(silent_s, key=lambda name: silent_s[name])
    if silent_s[who] <= allowed_s or min(silent_s.values()) > allowed_s:
        return None
    return Odd(who, f"silent for {silent_s[who]:.1f} s while others are heard")


def _elsewhere(signs: Sequence[Sign]) -> Odd | None:
    places = Counter((sign.method, sign.step) for sign in signs)
    (usual, count), *_ = places.most_common(1)
    others = [sign for sign in signs if (sign.method, sign.step) != usual]
    if not others or 2 * count <= len(signs):
        return None
    # The furthest behind is the one that is waited for.
    odd = min(others, key=lambda sign: (sign.step, sign.method))
    where = f"in {odd.method} of step {odd.step}" if odd.method else "in no call"
    return Odd(odd.who, f"{where} while {count} of {len(signs)} are in {usual[0] or 'no call'} of step {usual[1]}")


def _longest(signs: Sequence[Sign], now_s: float) -> Odd | None:
    busy = [sign for sign in signs if sign.method]
    if not busy:
        return None
    odd = min(busy, key=lambda sign: sign.since_s)
    return Odd(odd.who, f"in {odd.method} for {now_s - odd.since_s:.1f} s, the longest")
