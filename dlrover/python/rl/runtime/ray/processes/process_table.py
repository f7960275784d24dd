# SPDX-License-Identifier: Apache-2.0
"""The actors of one run and the executor's table of them: starting, finding and ending them.

Every process is a detached, named actor, so a master that has restarted finds them all by name.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import (
    TRAINER_ID,
    ProcessId,
    ProcessKind,
    RLRoleType,
    member_name,
    standby_name,
    trainer_name,
)
from dlrover.python.rl.config.spec import JobSpec, LivenessSpec
from dlrover.python.rl.control.events import Cause, Event, Process, make_lost_event
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.runtime.ray.cluster.api import ActorPlacement, ActorRequest, RayClusterApi, awaited, kill_process
from dlrover.python.rl.runtime.ray.processes.actors import Threads, member_env, process_env
from dlrover.python.rl.runtime.ray.processes.member import member_class
from dlrover.python.rl.runtime.ray.processes.trainer import TrainerActor
from dlrover.python.rl.trainer.port import RestartInfo
from dlrover.python.rl.trainer.workload import MemberContext

_LOG = get_logger(__name__)
_ASK_AGAIN_S = 0.5


@dataclass
class ProcessEntry:
    process_id: ProcessId
    number: int = 0  # its incarnation or epoch, 0 for a standby
    slot: int = -1  # index of its slot in its role
    standby: int = -1  # number of the standby it is or was, -1 for none
    born: int = 0  # the incarnation with which its process began, 0: this one
    former: "ProcessEntry | None" = None  # whose process continues as this one
    handle: Any = None
    process: Process | None = None  # where it runs, None until that is known
    up: bool = False
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    @property
    def role(self) -> RLRoleType:
        return RLRoleType(self.process_id.role)

    @property
    def is_standby(self) -> bool:
        return self.process_id.kind is ProcessKind.STANDBY

    @property
    def located(self) -> Process | None:
        """The place of the process, or of the former incarnation."""
        return self.process or (self.former.process if self.former is not None else None)

    def follow(self, number: int) -> "ProcessEntry":
        former, born = replace(self, former=None), self.born or self.number
        return ProcessEntry(self.process_id, number, self.slot, self.standby, born, former, self.handle)

    def forget_process(self) -> None:
        self.handle, self.slot, self.standby, self.born, self.former = None, -1, -1, 0, None

    def cancel_tasks(self) -> None:
        for task in self.tasks:
            task.cancel()

    def loss(self, cause: Cause) -> Event:
        # A trainer that failed may name a worker as the cause.
        if self.process_id != TRAINER_ID or cause.who == "job":
            cause = replace(cause, who=str(self.process_id))
        return make_lost_event(self.process_id, self.number, cause, self.process.node if self.process else "")


class ProcessTable:
    """The current process of each id of a run. Removing an entry cancels its tasks."""

    def __init__(self) -> None:
        self._entries: dict[ProcessId, ProcessEntry] = {}
        self._slots: dict[tuple[str, int], ProcessEntry] = {}  # the last owner of each
        self.starting: list[StartingTogether] = []

    def put(self, entry: ProcessEntry) -> None:
        self.pop(entry.process_id)
        self._entries[entry.process_id] = entry
        self._slots[entry.process_id.role, entry.slot] = entry

    def pop(self, process_id: ProcessId) -> ProcessEntry | None:
        entry = self._entries.pop(process_id, None)
        if entry is not None:
            entry.cancel_tasks()
        return entry

    def find(self, process_id: ProcessId) -> ProcessEntry | None:
        return self._entries.get(process_id)

    def clear(self) -> list[Process]:
        """Remove all entries; returns their processes."""
        self.starting.clear()
        entries = list(self._entries.values())
        for entry in entries:
            self.pop(entry.process_id)
        return [process for entry in entries if (process := entry.located) is not None]

    def take_slot(self, entry: ProcessEntry, preferred: int, slots: int, lacking: Collection[int] = ()) -> None:
        """Give ``entry`` a free one of its role's ``slots``, if possible none of the ``lacking`` ones."""
        role = entry.process_id.role
        free = [preferred] if preferred < slots and self._is_free(role, preferred) else []
        if not free or preferred in lacking:
            free += [slot for slot in range(slots) if self._is_free(role, slot)]
        entry.slot = next((slot for slot in free if slot not in lacking), free[0] if free else preferred)
        self._slots[role, entry.slot] = entry

    def _is_free(self, role: str, slot: int) -> bool:
        holder = self._slots.get((role, slot))
        return holder is None or holder.slot != slot or self._entries.get(holder.process_id) is not holder

    def neighbours(self, pool: str) -> "Neighbours":
        peers = [peer for peer in self._entries.values() if peer.process_id.pool == pool]
        return Neighbours({peer.process_id.rank: peer.process or Process() for peer in peers})

    async def note_located(self, process_id: ProcessId) -> None:
        """Record that a process is located, in any incarnation, or no longer wanted."""
        for together in list(self.starting):
            together.missing.discard(process_id)
            if not together.missing and together in self.starting:
                self.starting.remove(together)
                await together.open()


_PER_TURN = 256  # workers that continue in one turn of the event loop, before it answers requests


class Neighbours:
    """The workers of a role by rank, and their places."""

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self._first = processes.get(0, Process())
        self._nodes = {rank: process.node for rank, process in processes.items()}
        self._local_ranks: dict[int, int] = {}
        self._sizes: Counter[str] = Counter()
        for rank in sorted(processes):
            self._local_ranks[rank] = self._sizes[self._nodes[rank]]
            self._sizes[self._nodes[rank]] += 1

    def context(self, job: JobSpec, member: ProcessId, name: str, restart: RestartInfo | None = None) -> MemberContext:
        role = RLRoleType(member.role)
        return MemberContext(
            name=name,
            role=role,
            rank=member.rank,
            world_size=job.workloads[role].num,
            local_rank=self._local_ranks[member.rank],
            local_world_size=self._sizes[self._nodes[member.rank]],
            master_addr=self._first.address,
            master_port=self._first.port,
            collocation=",".join(job.collocation_of(role)),
            restart=restart or RestartInfo(),
        )


class StartingTogether:
    """Workers of a role that start together: none begins before all, or their replacements, are located."""

    def __init__(self, table: ProcessTable, entries: Sequence[ProcessEntry]) -> None:
        self._table, self._entries = table, entries
        self.missing = {entry.process_id for entry in entries}
        self._gates = [asyncio.Event() for _ in range(0, len(entries), _PER_TURN)]
        self._gate_of = {entry.process_id: self._gates[at // _PER_TURN] for at, entry in enumerate(entries)}
        self._neighbours: Neighbours | None = None
        table.starting.append(self)

    async def in_turns(self) -> AsyncIterator[ProcessEntry]:
        """Yield the entries that are still current."""
        for number, entry in enumerate(self._entries, 1):
            if self._table.find(entry.process_id) is entry:
                yield entry
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)

    async def wait(self, entry: ProcessEntry, timeout_s: float) -> Neighbours:
        """Wait for the others after ``entry`` is located. Raises TimeoutError: one may have no place yet."""
        await self._table.note_located(entry.process_id)
        async with asyncio.timeout(timeout_s):
            await self._gate_of[entry.process_id].wait()
        if self._neighbours is None:
            self._neighbours = self._table.neighbours(entry.process_id.pool)
        return self._neighbours

    async def open(self) -> None:
        try:
            for gate in self._gates:
                gate.set()
                await asyncio.sleep(0)
        finally:
            for gate in self._gates:
                gate.set()


def entries_of(state: JobState) -> Iterator[ProcessEntry]:
    for process_id, member in state.members.items():
        if member.process is not None:
            slot = member.process.slot
            number, born = member.incarnation, member.born
            yield ProcessEntry(process_id, number, slot, member.standby, born, process=member.process)
    for role, standbys in state.standbys.items():
        for number, standby in standbys.items():
            if standby.process is not None:
                process_id = ProcessId.standby(role, number)
                yield ProcessEntry(process_id, 0, standby.process.slot, number, process=standby.process)
    if state.trainer.process is not None:
        yield ProcessEntry(TRAINER_ID, state.epoch, process=state.trainer.process)


_POLL_S = 0.05
_GONE_S = 20.0
_CLOSE_GRACE_S = 1.0
_LEAVE_S = 3.0  # a gloo collective that has lost a rank fails at once
_LEAVE_DEVICES_S = 10.0  # one of nccl is aborted after the next heartbeat


@dataclass
class ActorPool:
    """Starts, finds and ends a run's actors; ``methods`` are the public methods of each role's workload."""

    job: JobSpec
    run: str
    methods: Mapping[str, tuple[str, ...]]
    master: Any
    beats: LivenessSpec
    cluster: RayClusterApi
    _threads: Threads = field(default_factory=Threads)
    _made: dict[RLRoleType, tuple[type, Mapping[str, str]]] = field(default_factory=dict)

    def set_job(self, job: JobSpec) -> None:
        self.job, self._made = job, {}

    def member_name(self, role: str, rank: int, incarnation: int, standby: int = -1) -> str:
        """Return the actor name of a worker; a former standby keeps its name."""
        if standby >= 0:
            return standby_name(self.job.name, self.run, role, standby)
        return member_name(self.job.name, self.run, role, rank, incarnation)

    def name_of(self, entry: ProcessEntry) -> str:
        if entry.process_id == TRAINER_ID:
            return trainer_name(self.job.name, self.run, entry.number)
        process_id, number = entry.process_id, entry.born or entry.number
        return self.member_name(process_id.role, process_id.rank, number, entry.standby)

    def list_names(self) -> list[str]:
        return self.cluster.list_actors(f"{self.job.name}/{self.run}/")

    async def start(self, entry: ProcessEntry, placement: ActorPlacement) -> Any:
        cls: type
        env: Mapping[str, str]
        python = ""
        arguments: tuple[Any, ...]
        if entry.process_id == TRAINER_ID:
            cls, env, arguments = TrainerActor, process_env(self.job), (entry.number,)
        else:
            if entry.role not in self._made:  # once: Ray's head stores each class, and finding secrets takes time
                member = member_class(self.job.workloads[entry.role].class_, self.methods.get(entry.role, ()))
                self._made[entry.role] = member, member_env(self.job, entry.role)
            cls, env = self._made[entry.role]
            python = self.job.workloads[entry.role].python
            arguments = entry.process_id, entry.process_id.rank if entry.is_standby else entry.number
        name = self.name_of(entry)
        await self.end_named([name])  # a master that died may have started it
        request = ActorRequest(name, cls, (*arguments, self.master, self.beats), env, placement, python=python)
        return await self._threads.run(self.cluster.start_actor, request)

    async def find(self, name: str) -> Any:
        return await asyncio.to_thread(self.cluster.find_actor, name)

    async def outcome_of(self, trainer: Any) -> Cause | None:
        """Return a trainer's failure or None; repeats a call whose connection broke. Raises RayActorError."""
        while True:
            try:
                outcome: Cause | None = await trainer.run.remote()  # waits: the training itself; its death ends it
            except ActorUnavailableError:
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                return outcome

    async def let_leave(self, entry: ProcessEntry) -> bool:
        """Let a process leave its peers and continue as ``entry``. Returns False if it does not leave soon."""
        limit_s = _LEAVE_S
        if self.job.trainer.device_type != "CPU":
            limit_s = _LEAVE_DEVICES_S + self.beats.beat_s
        try:
            async with asyncio.timeout(limit_s):
                await awaited(entry.handle.dlrover_leave.remote())
        except (TimeoutError, RayError) as error:
            why = str(error).partition("\n")[0] or f"no answer in {limit_s:g} s"
            _LOG.warning("%s gets another process: %s", entry.process_id, why)
            return False
        return True

    async def end(self, entry: ProcessEntry) -> None:
        if entry.handle is None:
            entry.handle = await self.find(self.name_of(entry))
        if entry.handle is not None:
            self.cluster.kill_actor(entry.handle)
        if (process := entry.located) is not None:
            await kill_process(self.cluster, process)

    async def end_named(self, names: Sequence[str]) -> None:
        """Kill the actors with these names and wait until all names are free."""
        for name in names:
            handle = await self.find(name)
            if handle is not None:
                self.cluster.kill_actor(handle)
        deadline_s = asyncio.get_running_loop().time() + _GONE_S
        for name in names:
            while await self.find(name) is not None:
                if asyncio.get_running_loop().time() > deadline_s:
                    _LOG.warning("the actor %s is still there after %g s", name, _GONE_S)
                    return
                await asyncio.sleep(_POLL_S)

    async def end_once_started(self, name: str) -> None:
        """End an actor that may still be starting and is no longer needed."""
        await self._threads.settle(_GONE_S)
        await self.end_named([name])

    async def end_all(self) -> None:
        """End every process of the run: the trainer, then the workers, which may close their workloads."""
        await self._threads.settle(_GONE_S)
        names = await asyncio.to_thread(self.list_names)
        trainers = [name for name in names if "/trainer/" in name]
        await self.end_named(trainers)
        members = [name for name in names if name not in trainers]
        await asyncio.gather(*map(self._close, members))
        await self.end_named(members)

    async def _close(self, name: str) -> None:
        """Let an idle workload close; a busy or dead one gets only a moment."""
        handle = await self.find(name)
        if handle is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_GRACE_S):
                await awaited(handle.dlrover_close.remote())
        except (TimeoutError, RayActorError):
            pass
        except Exception as error:  # noqa: BLE001 -- the user's code may fail; its process ends
            _LOG.warning("%s did not close: %s", name, error)
