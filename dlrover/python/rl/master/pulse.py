"""Who of a job's processes makes no progress: their beats come in, hangs go out with the stacks that show them."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    Event,
    MemberLost,
    Process,
    RecoveryScope,
    StandbyLost,
    TrainerLost,
)
from dlrover.python.rl.control.liveness import Hang, Listening, Sign, hangs, odd_one_out
from dlrover.python.rl.control.state import JobState, MemberPhase, StandbyPhase
from dlrover.python.rl.runtime.beats import CONSTRUCTING, Beat, BeatTerms
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
        beats: how the processes beat.
        process_of: where a process is.
    """

    def __init__(self, job: JobSpec, beats: BeatTerms, process_of: Callable[[str], Process | None]) -> None:
        self._beats, self._process_of = beats, process_of
        self._limits_s = {str(role): spec.hang_after_s for role, spec in job.workloads.items()}
        self._limits_s |= {f"{role}-standby": spec.hang_after_s for role, spec in job.workloads.items()}
        self._limits_s["trainer"] = job.trainer.hang_after_s
        self._signs: dict[str, Sign] = {}
        self._listening_since_s = self._looked_s = time.monotonic()

    def take(self, beat: Beat, state: JobState) -> bool:
        """Take a beat in; False when the state knows a later process in its place."""
        if not _current(beat, state):
            return False
        if beat.who not in _numbers_up(state) or beat.method == CONSTRUCTING:
            return True  # starting has a limit of its own, also where the news that it is over has come first
        now_s = time.monotonic()
        since_s = now_s - beat.age_s
        self._signs[beat.who] = Sign(beat.who, beat.number, beat.method, since_s, beat.step, now_s)
        return True

    async def hangs(self, state: JobState) -> list[Condemned]:
        """The processes that hang now, each with the evidence."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * self._beats.beat_s + 1.0:
            self._listening_since_s = now_s  # this process was itself stopped: it has heard nobody meanwhile
        self._looked_s = now_s
        up = self._signs_of(state, now_s)
        listening = Listening(self._beats.beat_s, self._listening_since_s, self._beats.lease_s)
        culprits = _culprits(hangs(up, self._limits_s, listening, now_s), state, listening, now_s)
        condemned = await asyncio.gather(*(self._condemn(hang, up, listening, now_s) for hang in culprits))
        self._looked_s = time.monotonic()  # taking stacks is no sign of having been stopped: beats came in meanwhile
        return condemned

    def _signs_of(self, state: JobState, now_s: float) -> list[Sign]:
        """The newest sign of each process that is up. One that has not been heard yet, because it or this master has
        just come, is taken as heard now."""
        up = _numbers_up(state)
        for who, number in up.items():
            sign = self._signs.get(who)
            if sign is None or sign.number != number:
                self._signs[who] = Sign(who, number, "", now_s, -1, now_s)
        self._signs = {who: self._signs[who] for who in up}
        return list(self._signs.values())

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
        if role.endswith("-standby"):
            return Condemned(StandbyLost(role.removesuffix("-standby"), int(rank), cause, node), process)
        return Condemned(MemberLost(role, int(rank), sign.number, cause, node), process)

    async def _stacks(self, signs: list[Sign]) -> str:
        located = [(sign.who, self._process_of(sign.who)) for sign in signs[:_MOST_STACKS]]
        known = [(who, process) for who, process in located if process is not None]
        texts = await asyncio.gather(*(stacks_there(process) for _, process in known))
        return "\n\n".join(
            f"{who} (pid {process.pid}):\n{text}" for (who, process), text in zip(known, texts, strict=True)
        )


def _numbers_up(state: JobState) -> dict[str, int]:
    """Every process that is up, with its incarnation, epoch or standby's number."""
    up = {who: member.incarnation for who, member in state.members.items() if member.phase is MemberPhase.UP}
    if state.trainer.phase is MemberPhase.UP:
        up["trainer"] = state.epoch
    for role, pool in state.standbys.items():
        ready = (number for number, standby in pool.items() if standby.phase is StandbyPhase.READY)
        up |= {f"{role}-standby[{number}]": number for number in ready}
    return up


def _current(beat: Beat, state: JobState) -> bool:
    """Whether the state knows of no later process in the place of the one that beats."""
    if beat.who == "trainer":
        return beat.number >= state.epoch
    if beat.who in state.members:
        return beat.number >= state.members[beat.who].incarnation
    role = beat.who.partition("-standby[")[0]
    return beat.number in state.standbys.get(role, {})


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
