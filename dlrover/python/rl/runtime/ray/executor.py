# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: each command of the brain, and what it ends in, from one table of processes.
"""Runs the brain's commands on Ray, on the event loop of the master's process.

Each command becomes a task that ends in an event, also if it fails. The executor finds everything by name
(:meth:`RayExecutor.adopt`), so a master may die at any moment.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import RayActorError

from dlrover.python.rl.common.errors import PlacementTimeout
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId, ProcessKind
from dlrover.python.rl.config.secrets import Secrets, unseal
from dlrover.python.rl.control import commands, events
from dlrover.python.rl.control.events import Cause, CauseKind, Process
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat
from dlrover.python.rl.runtime.member.loading import Emit
from dlrover.python.rl.runtime.ray.cluster.api import RayClusterApi
from dlrover.python.rl.runtime.ray.cluster.nodes import NodeWatch
from dlrover.python.rl.runtime.ray.placement import Reservations, RunPlan
from dlrover.python.rl.runtime.ray.processes.actors import Detached, MemberGone, answer_of, classify
from dlrover.python.rl.runtime.ray.processes.process_table import (
    ActorPool,
    ProcessEntry,
    ProcessTable,
    StartingTogether,
    entries_of,
)
from dlrover.python.rl.runtime.ray.processes.trainer import TrainerStart
from dlrover.python.rl.trainer.port import RestartInfo

_LOG = get_logger(__name__)

_BEATS_PER_SECOND = 1000.0  # the load of one master: with more processes each sends fewer
_AWAKE = 64  # tasks that continue in one turn of the event loop, before it answers requests
_STANDBY_BEATS = 20  # heartbeat intervals in which a ready standby must answer when it is needed


class RayExecutor:
    """Executes a run of a job as detached, named actors, which get the handle ``master``. Restarted workers get
    ``open_step``, the step of the trainer's last heartbeat or 0, and their reason in ``last_causes``."""

    def __init__(self, plan: RunPlan, master: Any, cluster: RayClusterApi) -> None:
        self._job, self._plan = plan.job, plan
        self.reservations = Reservations(plan, cluster)
        self._table = ProcessTable()
        processes = sum(spec.num + spec.standby for spec in self._job.workloads.values()) + 1
        liveness = self._job.liveness
        self.beats = replace(liveness, beat_s=max(liveness.beat_s, processes / _BEATS_PER_SECOND))
        self._pool = ActorPool(self._job, plan.run, plan.methods, master, self.beats, cluster)
        self.nodes = NodeWatch(cluster.list_nodes)
        self._incarnation = 0
        self.last_causes: dict[ProcessId, str] = {}
        self._full_sizes: dict[str, int] = {}
        self.open_step = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._detached = Detached(self._job.name)
        self._turnstile = asyncio.Semaphore(_AWAKE)

    def execute(self, command: commands.Command, emit: Emit) -> None:
        """Start a command. A command that was started before, also by an earlier master, finds its result."""
        match command:
            case commands.Place():
                self._start_task(self._place(command, emit), emit)
            case commands.StartMembers():
                self._start_task(self._start_members(command, emit), emit)
            case commands.StartStandby():
                process_id = ProcessId.standby(command.role, command.number)
                entry = self._replace(ProcessEntry(process_id, standby=command.number))
                self._start_task(self._prepare(entry, command.excluded, emit), emit, entry)
            case commands.StartTrainer():
                entry = self._replace(ProcessEntry(TRAINER_ID, command.epoch))
                self._start_task(self._run_trainer(entry, command, emit), emit, entry)
            case commands.Kill(process_id, number):
                if process_id.kind is ProcessKind.STANDBY:
                    self._discard(process_id)
                else:
                    self._kill(process_id, number)
            case commands.Release():
                for task in list(self._tasks):
                    task.cancel()
                self._start_task(self._release(command, self._table.clear(), emit), emit)
            case _:
                self._start_task(_wait(command, emit), emit)

    def _start_task(self, work: Coroutine[Any, Any, None], emit: Emit, entry: ProcessEntry | None = None) -> None:
        """Run ``work``. Its error is the loss of ``entry``, or without one the failure of the job."""

        def finish(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                emit(self._event_of(error, entry))

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(finish)
        if entry is not None:
            entry.tasks.append(task)

    def _event_of(self, error: Exception, entry: ProcessEntry | None) -> events.Event:
        if isinstance(error, PlacementTimeout):
            cause = Cause(CauseKind.NO_RESOURCES, "job", str(error))
            kind = entry.process_id.kind if entry is not None else None
            if entry is not None and kind is ProcessKind.MEMBER and self.reservations.is_elastic(entry.role):
                return events.Unplaced(entry.process_id.role, entry.process_id.rank, entry.number, cause)
            if entry is not None and kind is ProcessKind.STANDBY:
                return entry.loss(cause)
            return events.Failed(self._incarnation, cause)
        if entry is None:
            _LOG.error("%s: the executor failed", self._job.name, exc_info=error)
            cause = Cause(CauseKind.INTERNAL, "job", f"{type(error).__name__}: {error}")
            return events.Failed(self._incarnation, cause)
        if isinstance(error, TimeoutError):
            cause = Cause(CauseKind.HUNG, "job", f"not up within {self._job.liveness.start_timeout_s:g} s")
        else:
            cause = self.nodes.oom_kills.explain(entry.process_id, entry.process, classify(error, entry.process))
        self.last_causes[entry.process_id] = f"{cause.kind.value}: {cause.message}"
        return entry.loss(cause)

    def _watch(self, entry: ProcessEntry, emit: Emit) -> None:
        async def watch() -> None:
            raise MemberGone(str(entry.process_id), await self._pool.cluster.until_ended(entry.handle))

        self._start_task(watch(), emit, entry)

    async def watch_nodes(self, emit: Emit) -> None:
        """Emit the loss of nodes of the run, until cancelled."""
        await self.nodes.watch(lambda loss: emit(loss) if loss.node in self.reservations.nodes else None)

    def take_beat(self, beat: Heartbeat) -> None:
        """Record the trainer's step, and what a heartbeat reports about its node."""
        if beat.process_id == TRAINER_ID:
            self.open_step = beat.step
        process = self.process_of(beat.process_id)
        self.nodes.oom_kills.note(beat.process_id, process, beat.oom_kills)
        if beat.notice and process is not None and process.node:
            self.nodes.take_notice(process.node, beat.notice)

    def process_of(self, process_id: ProcessId) -> Process | None:
        return entry.process if (entry := self._table.find(process_id)) else None

    def name_of(self, role: str, rank: int, incarnation: int, standby: int) -> str:
        return self._pool.member_name(role, rank, incarnation, standby)

    def reveal(self, secrets: Secrets) -> None:
        """Use the job's secrets for the processes that start from now on."""
        self._plan = replace(self._plan, job=unseal(self._plan.job, secrets))
        self._job = unseal(self._job, secrets)
        self._pool.set_job(self._job)

    def resize(self, state: JobState) -> None:
        """Adopt the sizes of the roles, before commands that follow from them."""
        self._full_sizes = dict(state.wanted)
        if state.settings is not None and state.most:
            self._job = self._plan.job.with_sizes({role: spec.num for role, spec in state.settings.roles.items()})
            self.reservations.replan(self._plan.placement.with_places(state.most))
            for process_id in state.retired:
                self._discard(process_id)
                self._detached.run(self._table.note_located(process_id))

    async def _place(self, command: commands.Place, emit: Emit) -> None:
        self._incarnation = command.incarnation
        await self.reservations.reserve(command.incarnation, command.excluded)
        emit(events.Placed(command.incarnation))

    async def _start_members(self, command: commands.StartMembers, emit: Emit) -> None:
        together = StartingTogether(self._table, [self._add_member(command, *member) for member in command.members])
        async for entry in together.in_turns():
            self._start_task(self._start_member(entry, together, command.excluded, emit), emit, entry)

    def _add_member(self, command: commands.StartMembers, rank: int, incarnation: int) -> ProcessEntry:
        """Add the entry of a new worker, with its own former actor or a standby's if there is one."""
        former = self._table.find(ProcessId(command.role, rank)) if rank in command.rejoining else None
        if former is not None and former.up:
            entry = former.follow(incarnation)
            self._table.put(entry)
            return entry
        number = command.standbys.get(rank, -1)
        standby = self._table.pop(ProcessId.standby(command.role, number)) if number >= 0 else None
        entry = ProcessEntry(ProcessId(command.role, rank), incarnation, standby=number)
        if standby is not None:
            entry.slot, entry.handle = standby.slot, standby.handle
        return self._replace(entry)

    def _replace(self, entry: ProcessEntry) -> ProcessEntry:
        """Add and return an entry, and end its predecessor, which may only be unreachable."""
        self._discard(entry.process_id)
        self._table.put(entry)
        return entry

    def _discard(self, process_id: ProcessId) -> None:
        former = self._table.pop(process_id)
        if former is not None and former.handle is not None:
            self._detached.run(self._pool.end(former))

    async def _start_actor(self, entry: ProcessEntry, excluded: tuple[str, ...]) -> None:
        preferred = self._job.workloads[entry.role].num if entry.is_standby else entry.process_id.rank
        slots, lacking = len(self.reservations.slots[entry.role]), self.reservations.lacking_slots(entry.role)
        self._table.take_slot(entry, preferred, slots, lacking)
        placement = await self.reservations.place(entry.role, entry.slot, excluded)
        try:
            entry.handle = await self._pool.start(entry, placement)
        except asyncio.CancelledError:
            self._detached.run(self._pool.end_once_started(self._pool.name_of(entry)))
            raise

    async def _start_member(
        self, entry: ProcessEntry, together: StartingTogether, excluded: tuple[str, ...], emit: Emit
    ) -> None:
        process_id, timeout_s = entry.process_id, self._job.liveness.start_timeout_s
        async with self._turnstile:
            await asyncio.sleep(0)
        if entry.former is not None and not await self._pool.let_leave(entry):
            self._detached.run(self._pool.end(entry.former))
            entry.forget_process()
        if entry.handle is None:
            await self._start_actor(entry, excluded)
        self._watch(entry, emit)
        entry.process = await self._locate(entry)
        neighbours = await together.wait(entry, self._job.placement_timeout_s + timeout_s)
        async with self._turnstile:
            await asyncio.sleep(0)
        reason = self.last_causes.pop(process_id, "other processes had to restart") if entry.number > 1 else ""
        restart = RestartInfo(entry.number - 1, reason, max(self.open_step - 1, 0))
        context = neighbours.context(self._job, process_id, self._pool.name_of(entry), restart)
        ref = entry.handle.dlrover_start.remote(self._job, context, entry.number)
        await answer_of(str(process_id), ref, timeout_s)
        entry.up = True
        identity = process_id.role, process_id.rank, entry.number
        emit(events.MemberStarted(*identity, entry.process, entry.standby, entry.born))

    async def _locate(self, entry: ProcessEntry) -> Process:
        """Return where a process runs, and a free TCP port: at rank 0, where all meet, a port that the job prefers."""
        meets = entry.process_id.rank == 0 and not entry.is_standby
        ref = entry.handle.dlrover_locate.remote(self._job.preferred_ports(entry.role) if meets else ())
        uses_groups = self.reservations.uses_groups
        timeout_s = self._job.liveness.start_timeout_s if uses_groups else self._job.placement_timeout_s
        if entry.standby >= 0 and not entry.is_standby:
            timeout_s = min(timeout_s, _STANDBY_BEATS * self.beats.beat_s)  # it was ready
        try:
            process: Process = await answer_of(str(entry.process_id), ref, timeout_s)
        except TimeoutError:
            if uses_groups or entry.standby >= 0:
                raise
            raise await self.reservations.timeout_error() from None  # without groups it may never be scheduled
        self.reservations.nodes.add(process.node)
        return replace(process, slot=entry.slot)

    async def _prepare(self, entry: ProcessEntry, excluded: tuple[str, ...], emit: Emit) -> None:
        await self._start_actor(entry, excluded)
        self._watch(entry, emit)
        entry.process = await self._locate(entry)
        ref = entry.handle.dlrover_prepare.remote(self._job)
        await answer_of(str(entry.process_id), ref, self._job.liveness.start_timeout_s)
        emit(events.StandbyReady(entry.process_id.role, entry.process_id.rank, entry.process))

    async def _run_trainer(self, entry: ProcessEntry, command: commands.StartTrainer, emit: Emit) -> None:
        placement = await self.reservations.place_trainer(command.excluded)
        entry.handle = await self._pool.start(entry, placement)
        self._watch(entry, emit)
        resources = {str(role): dict(slots[0].resources) for role, slots in self._plan.placement.slots.items()}
        # In rank order; the trainer waits for one that is being replaced.
        entries = {member: self._table.find(member) for member in (ProcessId(*pair) for pair in self._job.members())}
        members = {
            member: (entry.number, entry.handle) if entry is not None and entry.up else (0, None)
            for member, entry in entries.items()
        }
        start = TrainerStart(self._job, self._plan.run, command, members, resources, self._full_sizes)
        ref = entry.handle.start.remote(start)
        process: Process = await answer_of(str(TRAINER_ID), ref, self._job.liveness.start_timeout_s)
        entry.process = process
        self.reservations.nodes.add(process.node)
        emit(events.TrainerStarted(command.epoch, process))
        await self._wait_for_trainer(entry, emit)

    async def _wait_for_trainer(self, entry: ProcessEntry, emit: Emit) -> None:
        """Run the trainer, or wait for the end of a running one. The watch reports its death."""
        with suppress(RayActorError):
            outcome = await self._pool.outcome_of(entry.handle)
            emit(events.TrainerFinished(entry.number) if outcome is None else entry.loss(outcome))

    def _kill(self, process_id: ProcessId, number: int) -> None:
        entry = self._table.find(process_id)
        if entry is not None and entry.number == number:
            entry.cancel_tasks()
        else:
            entry = ProcessEntry(process_id, number)
        self._detached.run(self._detached.retry(partial(self._pool.end, entry)))

    async def _release(self, command: commands.Release, processes: Sequence[Process], emit: Emit) -> None:
        """End all processes of the run and release its resources; an error is logged, and stops no other action."""
        await self._detached.retry(self._pool.end_all)
        await self._detached.retry(self.reservations.release)
        if command.final:
            await self._detached.retry(partial(self.reservations.forget_commits, processes))
        emit(events.Released(command.incarnation))

    async def adopt(self, state: JobState, emit: Emit) -> int:
        """Watch the living processes of ``state``, report missing ones, and end others. Returns their count."""
        self._incarnation = state.incarnation
        self.resize(state)
        await self.reservations.find(state.incarnation, state.excluded, state.wanted)
        entries = {self._pool.name_of(entry): entry for entry in entries_of(state)}
        names = await asyncio.to_thread(self._pool.list_names)
        await self._pool.end_named([name for name in names if name not in entries])
        count = 0
        for name, entry in entries.items():
            entry.handle = await self._pool.find(name)
            if entry.handle is None:
                emit(entry.loss(Cause(CauseKind.PROCESS_DIED, "job", "it was gone when the master came back")))
                continue
            count += 1
            entry.up = True
            self._table.put(entry)
            if entry.process is not None:
                self.reservations.nodes.add(entry.process.node)
            self._watch(entry, emit)
            if entry.process_id == TRAINER_ID:
                self._start_task(self._wait_for_trainer(entry, emit), emit, entry)
        return count


async def _wait(command: commands.Wait, emit: Emit) -> None:
    emit(await asyncio.sleep(command.delay_s, events.WaitOver(command.timer)))
