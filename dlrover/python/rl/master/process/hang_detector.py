# SPDX-License-Identifier: Apache-2.0
"""Finds processes without progress, and slow ones, by their heartbeats, and reports them with their stacks."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.config.spec import JobSpec, LivenessSpec
from dlrover.python.rl.control.events import Cause, CauseKind, Event, Process, RecoveryScope, make_lost_event
from dlrover.python.rl.control.liveness import Hang, Listening, Paces, Sign, hangs, odd_one_out
from dlrover.python.rl.control.state import JobState, MemberPhase, StandbyPhase
from dlrover.python.rl.runtime.member.heartbeat import CONSTRUCTING, Heartbeat

_LOG = get_logger(__name__)

_MOST_STACKS = 8
"""Processes of a role whose stacks are read, enough to show which one waits for which."""


class HangDetector:
    """Records heartbeats and finds the processes that hang for longer than the limits of ``job``. ``condemned`` maps
    the event of each to its process, which is to be killed once the event is journalled."""

    def __init__(
        self,
        job: JobSpec,
        beats: LivenessSpec,
        process_of: Callable[[ProcessId], Process | None],
        read_stacks: Callable[[Process], Awaitable[str]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beats, self._process_of, self._read_stacks, self._now_s = beats, process_of, read_stacks, now_s
        self._limits_s: dict[str, float] = {}
        for role, spec in job.workloads.items():
            for process_id in (ProcessId(role), ProcessId.standby(role, 0)):
                self._limits_s[process_id.pool] = spec.hang_after_s
        self._limits_s[TRAINER_ID.pool] = job.trainer.hang_after_s
        self._signs: dict[ProcessId, Sign] = {}
        self._listening_since_s = self._looked_s = self._now_s()
        self._paces, self._replace_slow = Paces(job.liveness.slow_factor), job.liveness.replace_slow
        self.condemned: dict[Event, Process | None] = {}

    def take(self, beat: Heartbeat, state: JobState) -> bool:
        """Record a heartbeat; return False if the state has a later process in its place."""
        is_current, is_up = _standing(beat, state)
        if not is_current:
            return False
        if not is_up or beat.method == CONSTRUCTING:
            return True  # starting has a separate limit, even if the event of its end came first
        now_s = self._now_s()
        self._paces.note(beat.process_id, beat.number, beat.work)
        since_s = now_s - beat.age_s
        self._signs[beat.process_id] = Sign(beat.process_id, beat.number, beat.method, since_s, beat.step, now_s)
        return True

    def activities(self) -> dict[str, tuple[float, str | None, float]]:
        """Return the age of each process's last heartbeat, its current call, and the seconds since that progressed."""
        now_s = self._now_s()
        return {
            str(process_id): (now_s - sign.at_s, sign.method or None, now_s - sign.since_s if sign.method else 0.0)
            for process_id, sign in self._signs.items()
        }

    async def hangs(self, state: JobState) -> list[Event]:
        """Return the losses of processes that hang, and of slow workers that are to be replaced."""
        now_s = self._now_s()
        if now_s - self._looked_s > 2 * self._beats.beat_s + 1.0:
            self._listening_since_s = now_s  # this process was paused: no heartbeat was received in that time
        self._looked_s = now_s
        members = state.members.items()
        numbers = {process_id: member.incarnation for process_id, member in members if member.phase is MemberPhase.UP}
        if state.trainer.phase is MemberPhase.UP:
            numbers[TRAINER_ID] = state.epoch
        for role, pool in state.standbys.items():
            ready = (number for number, standby in pool.items() if standby.phase is StandbyPhase.READY)
            numbers |= {ProcessId.standby(role, number): number for number in ready}
        for process_id, number in numbers.items():
            sign = self._signs.get(process_id)
            if sign is None or sign.number != number:  # it or this master has just started: count a heartbeat now
                self._signs[process_id] = Sign(process_id, number, "", now_s, -1, now_s)
        self._signs = {process_id: self._signs[process_id] for process_id in numbers}
        up = list(self._signs.values())
        listening = Listening(self._beats.beat_s, self._listening_since_s, self._beats.lease_s)
        culprits = _culprits(hangs(up, self._limits_s, listening, now_s), state, listening, now_s)
        events = list(await asyncio.gather(*(self._condemn(hang, up, listening, now_s) for hang in culprits)))
        self._looked_s = self._now_s()  # reading stacks is not a pause: heartbeats came in all the time
        for slow in self._paces.find(numbers):
            _LOG.warning("%s", slow)
            if self._replace_slow:
                events.append(self._lost(slow.process_id, slow.number, str(slow)))
        return events

    async def _condemn(self, hang: Hang, up: list[Sign], listening: Listening, now_s: float) -> Event:
        sign, why = hang
        process_id = sign.process_id
        peers = [peer for peer in up if peer.process_id.pool == process_id.pool]
        odd = odd_one_out(peers, listening, now_s)
        message = why + (f"; odd one out: {odd[0].process_id}, {odd[1]}" if odd else "")
        looked_at = [sign, *(peer for peer in peers if peer is not sign)][:_MOST_STACKS]
        located = [(each.process_id, self._process_of(each.process_id)) for each in looked_at]
        running = [(peer_id, process) for peer_id, process in located if process is not None]
        texts = await asyncio.gather(*(self._read_stacks(process) for _, process in running))
        detail = "\n\n".join(
            f"{peer_id} (pid {process.pid}):\n{text}" for (peer_id, process), text in zip(running, texts, strict=True)
        )
        _LOG.error("%s hangs: %s\n%s", process_id, message, detail)
        del self._signs[process_id]
        return self._lost(process_id, sign.number, message, detail)

    def _lost(self, process_id: ProcessId, number: int, message: str, detail: str = "") -> Event:
        process = self._process_of(process_id)
        cause = Cause(CauseKind.HUNG, str(process_id), message, detail)
        event = make_lost_event(process_id, number, cause, process.node if process else "")
        self.condemned[event] = process
        return event


def has_lost_peer(beat: Heartbeat, state: JobState) -> bool:
    """Return True if the state has a later incarnation of a worker in the process that sent ``beat``."""
    member = state.members.get(beat.process_id)
    return member is not None and member.first <= beat.number < member.incarnation


def _standing(beat: Heartbeat, state: JobState) -> tuple[bool, bool]:
    """Return two flags: the state has no later process in place of the sender of ``beat``, and the sender is up."""
    process_id = beat.process_id
    if process_id == TRAINER_ID:
        return beat.number >= state.epoch, state.trainer.phase is MemberPhase.UP
    member = state.members.get(process_id)
    if member is not None:
        return beat.number >= member.first, member.phase is MemberPhase.UP
    standby = state.standbys.get(process_id.role, {}).get(beat.number)
    return standby is not None, standby is not None and standby.phase is StandbyPhase.READY


def _culprits(hanging: tuple[Hang, ...], state: JobState, listening: Listening, now_s: float) -> list[Hang]:
    """Return all hung processes, but of ranks that meet in collectives only the one for which the others wait."""
    culprits: list[Hang] = []
    for pool in dict.fromkeys(sign.process_id.pool for sign, _ in hanging):
        of_role = [(sign, why) for sign, why in hanging if sign.process_id.pool == pool]
        settings = state.settings.roles.get(pool) if state.settings else None
        if settings is not None and settings.scope is RecoveryScope.GROUP and len(of_role) > 1:
            odd = odd_one_out([sign for sign, _ in of_role], listening, now_s)
            of_role = [(sign, why) for sign, why in of_role if odd is None or sign is odd[0]]
        culprits += of_role
    return culprits
