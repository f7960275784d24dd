"""Carrying out the brain's commands on Ray. Lives in the master's process, on its event loop.

Each command becomes a task that ends in an event; a task that fails ends in the event of that failure. Whatever the
executor remembers can be found again by name (:meth:`RayExecutor.adopt`), so a master may die at any moment.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.commands import (
    Command,
    KillMember,
    KillStandby,
    KillTrainer,
    Place,
    Release,
    StartMembers,
    StartStandby,
    StartTrainer,
    Wait,
)
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    Event,
    Failed,
    MemberStarted,
    NodeLost,
    Placed,
    Process,
    Released,
    StandbyReady,
    TrainerFinished,
    TrainerStarted,
    WaitOver,
)
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.runtime.beats import BeatTerms
from dlrover.python.rl.runtime.executor import Emit
from dlrover.python.rl.runtime.ray.actors import find
from dlrover.python.rl.runtime.ray.detached import Detached
from dlrover.python.rl.runtime.ray.fleet import Fleet, kill_process
from dlrover.python.rl.runtime.ray.grounds import Grounds
from dlrover.python.rl.runtime.ray.member import MemberStart
from dlrover.python.rl.runtime.ray.nodes import NodeWatch
from dlrover.python.rl.runtime.ray.recovery import Seat
from dlrover.python.rl.runtime.ray.trainer import TrainerStart
from dlrover.python.rl.runtime.ray.units import TRAINER, Unit, Units, units_of
from dlrover.python.rl.runtime.ray.units import Place as Seating
from dlrover.python.rl.runtime.ray.watching import answer_of, cause_with_log, until_gone
from dlrover.python.rl.trainer.recovery import RestartInfo

_LOG = get_logger(__name__)

_BEATS_A_SECOND = 1000.0
"""What one master takes in: with more processes each beats less often."""


_STANDBY_BEATS = 20
"""How long, in beats, a standby that was ready may take to answer when it is needed."""


class RayExecutor:
    """Runs one run of a job as detached, named actors.

    Args:
        job: what to run.
        run: which run of it.
        placement: where its members go.
        methods: role to the public methods of its workload.
        master: the master's own handle, given to workloads and trainer.

    Attributes:
        beats: how its processes show that they live.
        open_step: the step that the trainer was last heard to be in, 0 for none; told to members that start again.
    """

    def __init__(
        self, job: JobSpec, run: str, placement: Placement, methods: Mapping[str, tuple[str, ...]], master: Any
    ) -> None:
        self._job, self._run, self._placement, self._master = job, run, placement, master
        self._grounds = Grounds(job, run, placement)
        self._units = Units(job)
        processes = sum(spec.num + spec.standby for spec in job.workloads.values()) + 1
        self.beats = BeatTerms(max(job.liveness.beat_s, processes / _BEATS_A_SECOND), job.liveness.lease_s)
        self._fleet = Fleet(job, run, methods, master, self.beats)
        self._incarnation = 0
        self._losses: dict[Seating, str] = {}
        self.open_step = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self._detached = Detached(job.name)

    def execute(self, command: Command, emit: Emit) -> None:
        """Begin a command. One that was begun before, by this master or an earlier one, finds what that has left."""
        if isinstance(command, Place):
            work = self._place(command, emit)
        elif isinstance(command, StartMembers):
            work = self._start_members(command, emit)
        elif isinstance(command, StartStandby):
            work = self._start_standby(command, emit)
        elif isinstance(command, StartTrainer):
            work = self._start_trainer(command, emit)
        elif isinstance(command, KillMember):
            self._kill(Seating(command.role, command.rank), command.incarnation)
            return
        elif isinstance(command, KillStandby):
            self._dismiss(Seating(command.role, command.number, standby=True))
            return
        elif isinstance(command, KillTrainer):
            self._kill(Seating(TRAINER), command.epoch)
            return
        elif isinstance(command, Release):
            self._stop_starting()
            work = self._release(command, emit)
        else:
            work = _wait(command, emit)
        self._begin(work, emit)

    # -- tasks --------------------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None], emit: Emit, unit: Unit | None = None) -> None:
        """Run ``work``. What it raises is the loss of ``unit``, or without one the failure of the job."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 -- the end of the line: it becomes an event
                emit(self._event_of(error, unit))

        task = asyncio.get_running_loop().create_task(guarded())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if unit is not None:
            unit.tasks.append(task)

    def _event_of(self, error: Exception, unit: Unit | None) -> Event:
        if isinstance(error, PlacementTimeout):
            return Failed(self._incarnation, Cause(CauseKind.NO_RESOURCES, "job", str(error)))
        if unit is None:
            _LOG.error("%s: the executor failed", self._job.name, exc_info=error)
            return Failed(self._incarnation, Cause(CauseKind.INTERNAL, "job", f"{type(error).__name__}: {error}"))
        if isinstance(error, TimeoutError):
            limit_s = self._job.liveness.start_timeout_s
            return self._loss(unit, Cause(CauseKind.HUNG, "job", f"not up within {limit_s:g} s"))
        return self._loss(unit, cause_with_log(error, unit.process))

    def _loss(self, unit: Unit, cause: Cause) -> Event:
        self._losses[unit.place] = f"{cause.kind.value}: {cause.message}"
        return unit.lost(cause)

    def _stop_starting(self) -> None:
        """What was still to begin shall not."""
        for task in list(self._under_way):
            task.cancel()
        self._units.clear()

    def _watch(self, unit: Unit, emit: Emit) -> None:
        async def watch() -> None:
            raise await until_gone(str(unit.place), unit.handle)

        self._begin(watch(), emit, unit)

    async def watch_nodes(self, emit: Emit) -> None:
        """Tell of nodes that the run has used and that are lost, until cancelled."""

        def lost(node: str, why: str) -> None:
            if self._grounds.is_used(node):
                emit(NodeLost(node, Cause(CauseKind.NODE_LOST, "job", f"the node {node[:8]} is lost: {why}")))

        await NodeWatch().watch(lost)

    def process_of(self, who: str) -> Process | None:
        """Where ``"ROLLOUT[1]"`` or ``"trainer"`` is, as far as it is known."""
        unit = self._units.find(Seating.parse(who))
        return unit.process if unit else None

    def name_of(self, role: str, rank: int, incarnation: int, standby: int) -> str:
        """The actor name of a member."""
        return self._fleet.member_name(role, rank, incarnation, standby)

    # -- placing ------------------------------------------------------------------------------------------------------

    async def _place(self, command: Place, emit: Emit) -> None:
        self._incarnation = command.incarnation
        await self._grounds.reserve(command.incarnation, command.excluded)
        emit(Placed(command.incarnation))

    # -- members ------------------------------------------------------------------------------------------------------

    async def _start_members(self, command: StartMembers, emit: Emit) -> None:
        units = [self._seat(command, rank, number) for rank, number in command.members]
        located = asyncio.Event()
        for unit in units:
            self._begin(self._start_member(unit, units, located, command.excluded, emit), emit, unit)

    def _seat(self, command: StartMembers, rank: int, incarnation: int) -> Unit:
        """The process that shall be a member: a standby, or one that is still to be made."""
        role, number = RLRoleType(command.role), command.standbys.get(rank, -1)
        standby = self._units.take(Seating(role, number, standby=True)) if number >= 0 else None
        unit = Unit(Seating(role, rank), incarnation, standby=number)
        if standby is not None:
            unit.slot, unit.handle = standby.slot, standby.handle
        self._succeed(unit)
        return unit

    def _succeed(self, unit: Unit) -> None:
        """Give a place to ``unit``. Whoever had it may only be believed dead: it is ended."""
        self._dismiss(unit.place)
        self._units.put(unit)

    def _dismiss(self, place: Seating) -> None:
        former = self._units.take(place)
        if former is not None and former.handle is not None:
            self._detached.run(self._end(former))

    async def _make(self, unit: Unit, excluded: tuple[str, ...]) -> None:
        """Start the process of a member or a standby."""
        role = RLRoleType(unit.place.role)
        preferred = self._job.workloads[role].num if unit.place.standby else unit.place.at
        unit.slot = self._units.free_slot(role, preferred)
        placed = await self._grounds.options(role, unit.slot, excluded)
        try:
            unit.handle = await self._fleet.make_member(unit, placed)
        except asyncio.CancelledError:
            self._detached.run(self._fleet.end_once_made(self._fleet.name_of(unit)))
            raise

    async def _start_member(
        self, unit: Unit, together: Sequence[Unit], located: asyncio.Event, excluded: tuple[str, ...], emit: Emit
    ) -> None:
        """Make it if need be, locate it, wait until all that start together are located, construct."""
        role, rank, timeout_s = RLRoleType(unit.place.role), unit.place.at, self._job.liveness.start_timeout_s
        if unit.handle is None:
            await self._make(unit, excluded)
        self._watch(unit, emit)
        unit.process = await self._locate(unit)
        if all(other.process is not None for other in together):
            located.set()
        await asyncio.wait_for(located.wait(), timeout_s)
        reason = self._losses.get(unit.place, "others of its role had to restart") if unit.number > 1 else ""
        restart = RestartInfo(unit.number - 1, reason, max(self.open_step - 1, 0))
        context = self._units.context(role, rank, self._fleet.name_of(unit), restart)
        started = unit.handle.dlrover_start.remote(MemberStart(self._job, context, unit.number))
        await answer_of(str(unit.place), started, timeout_s)
        unit.up = True
        emit(MemberStarted(role, rank, unit.number, unit.process, unit.standby))

    async def _locate(self, unit: Unit) -> Process:
        """Where a process is, and a port that is free there now."""
        ref = unit.handle.dlrover_locate.remote(self._job.preferred_ports(RLRoleType(unit.place.role)))
        reserved = self._grounds.reserved
        timeout_s = self._job.liveness.start_timeout_s if reserved else self._job.placement_timeout_s
        if unit.standby >= 0 and not unit.place.standby:
            timeout_s = min(timeout_s, _STANDBY_BEATS * self.beats.beat_s)  # it was ready
        try:
            found = await answer_of(str(unit.place), ref, timeout_s)
        except TimeoutError:
            if reserved or unit.standby >= 0:
                raise
            raise await self._grounds.lacking() from None  # without reserved groups there may never be a place for it
        process: Process = replace(found, slot=unit.slot)
        self._grounds.used(process.node)
        return process

    # -- standbys -----------------------------------------------------------------------------------------------------

    async def _start_standby(self, command: StartStandby, emit: Emit) -> None:
        unit = Unit(Seating(command.role, command.number, standby=True), standby=command.number)
        self._succeed(unit)
        self._begin(self._prepare(unit, command.excluded, emit), emit, unit)

    async def _prepare(self, unit: Unit, excluded: tuple[str, ...], emit: Emit) -> None:
        await self._make(unit, excluded)
        self._watch(unit, emit)
        unit.process = await self._locate(unit)
        prepared = unit.handle.dlrover_prepare.remote(self._job)
        await answer_of(str(unit.place), prepared, self._job.liveness.start_timeout_s)
        emit(StandbyReady(unit.place.role, unit.place.at, unit.process))

    # -- trainer ------------------------------------------------------------------------------------------------------

    async def _start_trainer(self, command: StartTrainer, emit: Emit) -> None:
        unit = Unit(Seating(TRAINER), command.epoch)
        self._succeed(unit)
        self._begin(self._run_trainer(unit, command, emit), emit, unit)

    async def _run_trainer(self, unit: Unit, command: StartTrainer, emit: Emit) -> None:
        placed = await self._grounds.trainer_options(command.excluded)
        unit.handle = await self._fleet.make_trainer(command.epoch, placed)
        self._watch(unit, emit)
        resources = {str(role): dict(slots[0].resources) for role, slots in self._placement.slots.items()}
        start = TrainerStart(self._job, self._run, command, self._seats(), resources)
        ref = unit.handle.start.remote(start)
        unit.process = await answer_of(TRAINER, ref, self._job.liveness.start_timeout_s)
        self._grounds.used(unit.process.node)
        emit(TrainerStarted(command.epoch, unit.process))
        await self._until_done(unit, emit)

    async def _until_done(self, unit: Unit, emit: Emit) -> None:
        """Let the trainer run, or where it runs already, wait for its end. Its death is the watch's to report."""
        with suppress(ray.exceptions.RayActorError):
            outcome: Cause | None = await unit.handle.run.remote()  # waits: the training itself; its death ends it
            emit(TrainerFinished(unit.number) if outcome is None else unit.lost(outcome))

    def _seats(self) -> tuple[Seat, ...]:
        """Who can be called, in rank order; one that is being replaced is waited for by the trainer."""
        found = {(role, rank): self._units.find(Seating(role, rank)) for role, rank in self._job.members()}
        return tuple(
            Seat(role, rank, unit.number, unit.handle) if unit is not None and unit.up else Seat(role, rank, 0, None)
            for (role, rank), unit in found.items()
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def _kill(self, place: Seating, number: int) -> None:
        unit = self._units.find(place)
        if unit is not None and unit.number == number:
            unit.forget()
        else:
            unit = Unit(place, number)

        async def kill() -> None:
            if unit.handle is None:
                unit.handle = await asyncio.to_thread(find, self._fleet.name_of(unit))
            await self._end(unit)

        self._detached.run(self._detached.insist(kill))

    async def _end(self, unit: Unit) -> None:
        if unit.handle is not None:
            ray.kill(unit.handle)
        if unit.process is not None:
            await kill_process(unit.process)

    async def _release(self, command: Release, emit: Emit) -> None:
        """End everything of the run. Whatever goes wrong is logged, and the rest goes on."""
        for what in (self._fleet.end_all, self._grounds.release, *([self._grounds.forget_commits] * command.final)):
            await self._detached.insist(what)
        emit(Released(command.incarnation))

    # -- after the master's own restart -------------------------------------------------------------------------------

    async def adopt(self, state: JobState, emit: Emit) -> int:
        """Find the processes that ``state`` says are up: watch those that are there, tell of those that are not. Every
        other process of the run is ended: nobody would know of it.

        Returns:
            How many were found.
        """
        self._incarnation = state.incarnation
        await self._grounds.find(state.incarnation, state.excluded)
        units = {self._fleet.name_of(unit): unit for unit in units_of(state)}
        there = await asyncio.to_thread(self._fleet.names)
        await self._fleet.end_named([name for name in there if name not in units])
        found = 0
        for name, unit in units.items():
            unit.handle = await asyncio.to_thread(find, name)
            if unit.handle is None:
                emit(unit.lost(Cause(CauseKind.PROCESS_DIED, "job", "it was gone when the master came back")))
                continue
            found += 1
            self._take_over(unit, emit)
        return found

    def _take_over(self, unit: Unit, emit: Emit) -> None:
        unit.up = True
        self._units.put(unit)
        if unit.process is not None:
            self._grounds.used(unit.process.node)
        self._watch(unit, emit)
        if unit.place.role == TRAINER:
            self._begin(self._until_done(unit, emit), emit, unit)


async def _wait(command: Wait, emit: Emit) -> None:
    await asyncio.sleep(command.delay_s)
    emit(WaitOver(command.timer))
