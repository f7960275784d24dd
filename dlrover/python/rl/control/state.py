# SPDX-License-Identifier: Apache-2.0
"""The state of a job, and the functions that start its processes: each returns the new state and its commands."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId, ProcessKind
from dlrover.python.rl.control.commands import Command, StartMembers, StartStandby, StartTrainer, Wait
from dlrover.python.rl.control.events import Cause, Process, Submitted

_CHUNK = 64

STANDBY_TRIES = 5
"""Standbys that a role may lose without progress in between; after that, it gets no more."""


class Phase(StrEnum):
    """The phase of a job. Workers, standbys and the trainer are recovered one by one within RUNNING.

    ::

        CREATED -> PLACED -> RUNNING -> ENDING -> FINISHED
           ^         |          |         |----> FAILED
           |         v          v         '----> STOPPED
           '------ RESTARTING <-'
    """

    CREATED = "created"  # resources are being reserved
    PLACED = "placed"  # workers and trainer are being started
    RUNNING = "running"  # the trainer runs or is being recovered
    RESTARTING = "restarting"  # a failed incarnation is being released, or the back-off runs
    ENDING = "ending"  # the outcome is decided; processes and resources are being released

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def terminal(self) -> bool:
        return self in (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)

    @property
    def live(self) -> bool:
        """Return True if processes of the current incarnation may exist."""
        return self in (Phase.PLACED, Phase.RUNNING)


class MemberPhase(StrEnum):
    WAITING = "waiting"  # no process: it is not due yet, or a back-off runs
    STARTING = "starting"
    UP = "up"


class StandbyPhase(StrEnum):
    WAITING = "waiting"  # no process: a back-off runs
    STARTING = "starting"
    READY = "ready"
    TAKING = "taking"  # it is becoming a worker


class EndReason(StrEnum):
    FINISHED = "finished"  # the trainer returned
    STOPPED = "stopped"  # on request
    NOT_RETRYABLE = "not_retryable"
    RESTART_LIMIT = "restart_limit"  # more restarts within the window than allowed


@dataclass(frozen=True)
class Member:
    incarnation: int  # of its process, or of the next one
    phase: MemberPhase = MemberPhase.WAITING
    process: Process | None = None  # while it is up
    standby: int = -1  # number of the standby that it is or was, -1 for none
    born: int = 0  # the first incarnation in its process, 0: this one

    @property
    def first(self) -> int:
        """The first incarnation in its process."""
        return self.born or self.incarnation

    def next(self, in_its_process: bool = False) -> "Member":
        return Member(self.incarnation + 1, born=self.first if in_its_process else 0)


_Chunks = tuple[tuple[Member, ...], ...]


class MemberMap(Mapping[ProcessId, Member]):
    """The workers, in order of role and rank; ``up`` is the number of those that are up. A change copies only the
    chunks of ranks that contain it, so an event costs the same with ten workers as with ten thousand."""

    __slots__ = ("_ids", "_roles", "up")

    def __init__(self, members: Mapping[ProcessId, Member] | None = None) -> None:
        ranks: dict[str, dict[int, Member]] = {}
        for process_id, member in (members or {}).items():
            ranks.setdefault(process_id.role, {})[process_id.rank] = member
        self._roles: dict[str, _Chunks] = {}
        for role, by_rank in ranks.items():
            if sorted(by_rank) != list(range(len(by_rank))):
                raise ValueError(f"the ranks of a role count from 0: {sorted(by_rank)}")
            starts = range(0, len(by_rank), _CHUNK)
            self._roles[role] = tuple(
                tuple(by_rank[rank] for rank in range(start, min(start + _CHUNK, len(by_rank)))) for start in starts
            )
        self._ids = [ProcessId(role, rank) for role, by_rank in ranks.items() for rank in range(len(by_rank))]
        self.up = sum(member.phase is MemberPhase.UP for member in self.values())

    def replacing(self, changes: Mapping[ProcessId, Member]) -> "MemberMap":
        """Return a copy in which these existing workers have new values. Raises KeyError for unknown workers."""
        changed: dict[tuple[str, int], list[Member]] = {}
        up = self.up
        for process_id, member in changes.items():
            place = process_id.role, process_id.rank // _CHUNK
            chunk = changed.get(place)
            if chunk is None:
                chunk = changed[place] = list(self._chunk(process_id))
            up += (member.phase is MemberPhase.UP) - (chunk[process_id.rank % _CHUNK].phase is MemberPhase.UP)
            chunk[process_id.rank % _CHUNK] = member
        roles = {role: list(self._roles[role]) for role, _ in changed}
        for (role, number), chunk in changed.items():
            roles[role][number] = tuple(chunk)
        other = MemberMap()
        other._roles = self._roles | {role: tuple(chunks) for role, chunks in roles.items()}
        other._ids, other.up = self._ids, up
        return other

    def changed_since(self, before: "MemberMap") -> Iterator[ProcessId]:
        """Yield the workers of ``before`` whose values may differ."""
        for role, chunks in before._roles.items():
            now = self._roles.get(role, ())
            for number, chunk in enumerate(chunks):
                if number >= len(now) or now[number] is not chunk:
                    yield from (ProcessId(role, number * _CHUNK + at) for at in range(len(chunk)))

    def __getitem__(self, process_id: ProcessId) -> Member:
        return self._chunk(process_id)[process_id.rank % _CHUNK]

    def __iter__(self) -> Iterator[ProcessId]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def values(self) -> Iterator[Member]:  # type: ignore[override]
        return chain.from_iterable(chain.from_iterable(self._roles.values()))

    def items(self) -> Iterator[tuple[ProcessId, Member]]:  # type: ignore[override]
        return zip(self._ids, self.values(), strict=True)

    def _chunk(self, process_id: ProcessId) -> tuple[Member, ...]:
        chunks, number = self._roles.get(process_id.role, ()), process_id.rank // _CHUNK
        if process_id.kind is not ProcessKind.MEMBER or not 0 <= number < len(chunks):
            raise KeyError(process_id)
        if process_id.rank % _CHUNK >= len(chunks[number]):
            raise KeyError(process_id)
        return chunks[number]


@dataclass(frozen=True)
class Standby:
    phase: StandbyPhase
    process: Process | None = None  # once it is ready


@dataclass(frozen=True)
class Trainer:
    phase: MemberPhase = MemberPhase.WAITING
    process: Process | None = None  # while it is up
    fresh: bool = True  # False: the workers hold the results of an earlier epoch
    reason: str = ""  # why it restarts


@dataclass(frozen=True)
class JobState:
    """The state of one job. Some fields are by subject, which is ``"job"``, ``"trainer"``, a role, a worker
    (``"ROLLOUT[1]"``) or a role's standbys."""

    phase: Phase = Phase.CREATED
    incarnation: int = 0  # 0 before the job is submitted, then 1 plus the number of its restarts
    epoch: int = 0  # of the trainer's process, or of the next one
    settings: Submitted | None = None
    members: MemberMap = field(default_factory=MemberMap)
    standbys: Mapping[str, Mapping[int, Standby]] = field(default_factory=dict)  # by role and number
    next_standby: Mapping[str, int] = field(default_factory=dict)  # by role: the number of its next standby
    trainer: Trainer = field(default_factory=Trainer)
    opened: bool = False  # the trainer has entered steps() in this incarnation
    released: bool = False  # nothing of this incarnation is left: the next one may start
    waits: Mapping[str, float] = field(default_factory=dict)  # running back-offs, by timer, in seconds
    excluded: tuple[str, ...] = ()  # nodes that are no longer used, oldest first
    node_losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by node: times of its lost processes
    causes: tuple[Cause, ...] = ()  # of the first and the newest recoveries, oldest first
    first_cause: Cause | None = None  # since the last progress
    tried: tuple[Cause, ...] = ()  # unknown errors retried in fresh processes since the last progress
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by subject: restarts within the window
    streaks: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Subject to the number of recoveries without progress in between, and the time of the last one."""

    recoveries: Mapping[str, int] = field(default_factory=dict)  # by subject: recoveries during which the job ran on
    restarts_by: Mapping[str, int] = field(default_factory=dict)  # by subject: restarts of the job that it caused
    committed: int = 0  # the last reported step
    most: Mapping[str, int] = field(default_factory=dict)  # by resized role: its largest number of workers so far
    wanted: Mapping[str, int] = field(default_factory=dict)  # by role: its planned size, if some workers are not placed
    retired: Mapping[ProcessId, int] = field(default_factory=dict)  # next incarnations of ranks that a resize removed
    master_starts: int = 0
    outcome: Phase | None = None  # the terminal phase that ENDING leads to
    ended_by: EndReason | None = None
    reason: str = ""  # for people
    failure: Cause | None = None  # the first cause since the last progress, once the job has failed

    @property
    def restarts(self) -> int:
        return sum(self.restarts_by.values())


Result = tuple[JobState, tuple[Command, ...]]


def ranks_of(state: JobState, role: str) -> range:
    return range(state.settings.roles[role].num) if state.settings is not None else range(0)


def starting_ranks(state: JobState, role: str) -> list[int]:
    members = ((rank, state.members[ProcessId(role, rank)]) for rank in ranks_of(state, role))
    return [rank for rank, member in members if member.phase is MemberPhase.STARTING]


def wait(state: JobState, timer: str, delay_s: float) -> Result:
    return replace(state, waits={**state.waits, timer: delay_s}), (Wait(timer, delay_s),)


def start_members(state: JobState, role: str, ranks: Sequence[int], spared: Iterable[int] = ()) -> Result:
    """Start waiting workers; ready standbys take the ranks that are not ``spared``."""
    if not ranks:
        return state, ()
    pool, left_out = state.standbys.get(role, {}), set(spared)
    ready = (number for number in sorted(pool) if pool[number].phase is StandbyPhase.READY)
    in_fresh_processes = (rank for rank in ranks if rank not in left_out)
    taking = dict(zip(in_fresh_processes, ready, strict=False))
    starting = {}
    for process_id in (ProcessId(role, rank) for rank in ranks):
        standby = taking.get(process_id.rank, -1)
        starting[process_id] = replace(state.members[process_id], phase=MemberPhase.STARTING, standby=standby)
    state = replace(state, members=state.members.replacing(starting))
    if taking:
        used = {number: replace(pool[number], phase=StandbyPhase.TAKING) for number in taking.values()}
        state = replace(state, standbys={**state.standbys, role: {**pool, **used}})
    return state, (_members_command(state, role, ranks),)


def _members_command(state: JobState, role: str, ranks: Iterable[int]) -> StartMembers:
    members = {rank: state.members[ProcessId(role, rank)] for rank in ranks}
    return StartMembers(
        role,
        tuple((rank, member.incarnation) for rank, member in members.items()),
        {rank: member.standby for rank, member in members.items() if member.standby >= 0},
        state.excluded,
        tuple(rank for rank, member in members.items() if member.born),
    )


def standby_subject(role: str) -> str:
    return ProcessId.standby(role, 0).pool


def has_lost_too_many_standbys(state: JobState, role: str) -> bool:
    count, _ = state.streaks.get(standby_subject(role), (0, 0.0))
    return count >= STANDBY_TRIES


def drop_standby(state: JobState, role: str, number: int) -> JobState:
    pool = {key: standby for key, standby in state.standbys.get(role, {}).items() if key != number}
    return replace(state, standbys={**state.standbys, role: pool})


def add_standby(state: JobState, role: str, delay_s: float = 0.0) -> Result:
    number = state.next_standby.get(role, 0)
    state = replace(
        state,
        next_standby={**state.next_standby, role: number + 1},
        standbys={**state.standbys, role: {**state.standbys.get(role, {}), number: Standby(StandbyPhase.WAITING)}},
    )
    if delay_s:
        return wait(state, f"{ProcessId.standby(role, number)}#0", delay_s)
    return start_standby(state, role, number)


def start_standby(state: JobState, role: str, number: int) -> Result:
    pool = {**state.standbys[role], number: Standby(StandbyPhase.STARTING)}
    return replace(state, standbys={**state.standbys, role: pool}), (StartStandby(role, number, state.excluded),)


def fill_standbys(state: JobState, role: str) -> Result:
    size = state.settings.roles[role].standby if state.settings is not None else 0
    commands: tuple[Command, ...] = ()
    if has_lost_too_many_standbys(state, role):
        return state, commands
    for _ in range(size - len(state.standbys.get(role, {}))):
        state, more = add_standby(state, role)
        commands += more
    return state, commands


def start_trainer(state: JobState) -> Result:
    state = replace(state, trainer=replace(state.trainer, phase=MemberPhase.STARTING))
    return state, (_trainer_command(state),)


def _trainer_command(state: JobState) -> StartTrainer:
    return StartTrainer(state.epoch, state.trainer.fresh, state.epoch - 1, state.trainer.reason, state.excluded)


def under_way(state: JobState) -> tuple[Command, ...]:
    commands: list[Command] = []
    for role in state.settings.roles if state.settings is not None else ():
        if starting := starting_ranks(state, role):
            commands.append(_members_command(state, role, starting))
    if state.trainer.phase is MemberPhase.STARTING:
        commands.append(_trainer_command(state))
    commands += [
        StartStandby(role, number, state.excluded)
        for role, pool in state.standbys.items()
        for number, standby in pool.items()
        if standby.phase is StandbyPhase.STARTING
    ]
    return (*commands, *(Wait(timer, delay_s) for timer, delay_s in state.waits.items()))


def processes(state: JobState) -> dict[ProcessId, Process]:
    """Return every process that is up: workers, the trainer, and standbys, including those that become workers."""
    located = {process_id: member.process for process_id, member in state.members.items()}
    located[TRAINER_ID] = state.trainer.process
    for role, pool in state.standbys.items():
        located |= {ProcessId.standby(role, number): standby.process for number, standby in pool.items()}
    return {process_id: process for process_id, process in located.items() if process is not None}
