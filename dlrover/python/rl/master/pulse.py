"""Who of a job's processes makes no progress: their beats come in, hangs go out with the stacks that show them."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Cause, CauseKind, Event, MemberLost, Process, RecoveryScope, TrainerLost
from dlrover.python.rl.control.liveness import Hang, Listening, Sign, hangs, odd_one_out
from dlrover.python.rl.control.state import JobState, MemberPhase
from dlrover.python.rl.runtime.beats import Beat
from dlrover.python.rl.runtime.ray.fleet import stacks_there

_LOG = get_logger(__name__)

_MOST_STACKS = 8
"""Processes of a role whose stacks are taken: enough to see who waits for whom."""


@dataclass(frozen=True)
class Condemned:
    """The event of a hanging process's loss, and the process, which is to be killed once the event is taken in."""

    event: Event
    process: Process | None


class Pulse:
    """Takes beats in and finds those that hang.

    Args:
        job: with the limits of its roles.
        process_of: where a process is.
    """

    def __init__(self, job: JobSpec, process_of: Callable[[str], Process | None]) -> None:
        self._process_of = process_of
        self._limits_s = {str(role): spec.hang_after_s for role, spec in job.workloads.items()}
        self._limits_s["trainer"] = job.trainer.hang_after_s
        self._beat_s = job.liveness.beat_s
        self._signs: dict[str, Sign] = {}
        self._listening_since_s = self._looked_s = time.monotonic()

    def take(self, beat: Beat, state: JobState) -> bool:
        """Take a beat in; False when the state knows a later process in its place."""
        current = _number(beat.who, state)
        if current is None or beat.number < current:
            return current is None
        now_s = time.monotonic()
        since_s = now_s - beat.age_s
        self._signs[beat.who] = Sign(beat.who, beat.number, beat.method, since_s, beat.step, now_s)
        return True

    async def hangs(self, state: JobState) -> list[Condemned]:
        """The processes that hang now, each with the evidence."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * self._beat_s + 1.0:
            self._listening_since_s = now_s  # this process was itself stopped: it has heard nobody meanwhile
        self._looked_s = now_s
        up = [sign for sign in self._signs.values() if _is_up(sign, state)]
        listening = Listening(self._beat_s, self._listening_since_s)
        found = hangs(up, self._limits_s, listening, now_s)
        return [await self._condemn(hang, up, listening, now_s) for hang in _culprits(found, state, listening, now_s)]

    async def _condemn(self, hang: Hang, up: list[Sign], listening: Listening, now_s: float) -> Condemned:
        sign = hang.sign
        peers = [peer for peer in up if peer.role == sign.role]
        odd = odd_one_out(peers, listening, now_s)
        message = hang.why + (f"; odd one out: {odd.who}, {odd.why}" if odd else "")
        detail = await self._stacks([sign, *(peer for peer in peers if peer.who != sign.who)])
        _LOG.error("%s hangs: %s\n%s", sign.who, message, detail)
        del self._signs[sign.who]
        process = self._process_of(sign.who)
        cause = Cause(CauseKind.HUNG, sign.who, message, detail)
        node = process.node if process else ""
        if sign.who == "trainer":
            return Condemned(TrainerLost(sign.number, cause, node), process)
        role, _, rank = sign.who.rstrip("]").partition("[")
        return Condemned(MemberLost(role, int(rank), sign.number, cause, node), process)

    async def _stacks(self, signs: list[Sign]) -> str:
        located = [(sign.who, self._process_of(sign.who)) for sign in signs[:_MOST_STACKS]]
        known = [(who, process) for who, process in located if process is not None]
        texts = await asyncio.gather(*(stacks_there(process) for _, process in known))
        return "\n\n".join(
            f"{who} (pid {process.pid}):\n{text}" for (who, process), text in zip(known, texts, strict=True)
        )


def _number(who: str, state: JobState) -> int | None:
    """The incarnation or epoch that the state knows of a process, None for none."""
    if who == "trainer":
        return state.epoch
    member = state.members.get(who)
    return member.incarnation if member else None


def _is_up(sign: Sign, state: JobState) -> bool:
    if sign.who == "trainer":
        return sign.number == state.epoch and state.trainer.phase is MemberPhase.UP
    member = state.members.get(sign.who)
    return member is not None and member.phase is MemberPhase.UP and member.incarnation == sign.number


def _culprits(found: tuple[Hang, ...], state: JobState, listening: Listening, now_s: float) -> list[Hang]:
    """Of a role whose ranks wait for each other the one that the others wait for; of the others all."""
    culprits: list[Hang] = []
    for role in dict.fromkeys(hang.sign.role for hang in found):
        of_role = [hang for hang in found if hang.sign.role == role]
        terms = state.terms.roles.get(role) if state.terms else None
        if terms is not None and terms.scope is RecoveryScope.GROUP and len(of_role) > 1:
            odd = odd_one_out([hang.sign for hang in of_role], listening, now_s)
            of_role = [hang for hang in of_role if odd is None or hang.sign.who == odd.who]
        culprits += of_role
    return culprits
