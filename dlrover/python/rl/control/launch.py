# SPDX-License-Identifier: Apache-2.0
"""Starts of members, standbys and the trainer: each function returns the new state and its commands."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.control.commands import Command, StartMembers, StartStandby, StartTrainer, Wait
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.control.state import (
    JobState,
    Member,
    MemberPhase,
    Standby,
    StandbyPhase,
    Trainer,
    ranks_of,
)

Result = tuple[JobState, tuple[Command, ...]]

STANDBY_TRIES = 5
"""Standbys that a role may lose without progress in between; then it gets no further ones."""


def wait(state: JobState, timer: str, delay_s: float) -> Result:
    return replace(state, waits={**state.waits, timer: delay_s}), (Wait(timer, delay_s),)


# -- members ----------------------------------------------------------------------------------------------------------


def start_members(state: JobState, role: str, ranks: Sequence[int], spared: Iterable[int] = ()) -> Result:
    """Start waiting members; a ready standby becomes each of them, except for the ``spared`` ranks."""
    if not ranks:
        return state, ()
    pool = state.standbys.get(role, {})
    ready = (number for number in sorted(pool) if pool[number].phase is StandbyPhase.READY)
    taking = dict(zip((rank for rank in ranks if rank not in set(spared)), ready, strict=False))
    starting = {
        ProcessId(role, rank): replace(
            state.members[ProcessId(role, rank)], phase=MemberPhase.STARTING, standby=taking.get(rank, -1)
        )
        for rank in ranks
    }
    state = replace(state, members={**state.members, **starting})
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
    )


def next_incarnation(member: Member) -> Member:
    return Member(member.incarnation + 1)


# -- standbys ---------------------------------------------------------------------------------------------------------


def standby_subject(role: str) -> str:
    return ProcessId.standby(role, 0).pool


def has_lost_too_many_standbys(state: JobState, role: str) -> bool:
    streak = state.streaks.get(standby_subject(role))
    return streak is not None and streak.count >= STANDBY_TRIES


def drop_standby(state: JobState, role: str, number: int) -> JobState:
    pool = state.standbys.get(role, {})
    if number not in pool:
        return state
    remaining = {key: standby for key, standby in pool.items() if key != number}
    return replace(state, standbys={**state.standbys, role: remaining})


def add_standby(state: JobState, role: str, delay_s: float = 0.0) -> Result:
    number = state.next_standby.get(role, 0)
    phase = StandbyPhase.WAITING if delay_s else StandbyPhase.STARTING
    state = replace(
        state,
        next_standby={**state.next_standby, role: number + 1},
        standbys={**state.standbys, role: {**state.standbys.get(role, {}), number: Standby(phase)}},
    )
    if delay_s:
        return wait(state, f"{ProcessId.standby(role, number)}#0", delay_s)
    return state, (StartStandby(role, number, state.excluded),)


def start_standby(state: JobState, role: str, number: int) -> Result:
    """Start a standby whose back-off is over."""
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


# -- the trainer ------------------------------------------------------------------------------------------------------


def start_trainer(state: JobState) -> Result:
    state = replace(state, trainer=replace(state.trainer, phase=MemberPhase.STARTING))
    return state, (_trainer_command(state),)


def _trainer_command(state: JobState) -> StartTrainer:
    trainer: Trainer = state.trainer
    return StartTrainer(state.epoch, trainer.fresh, state.epoch - 1, trainer.reason, state.excluded)


# -- after the master's own restart -----------------------------------------------------------------------------------


def under_way(state: JobState) -> tuple[Command, ...]:
    commands: list[Command] = []
    for role in state.settings.roles if state.settings is not None else ():
        starting = [
            rank for rank in ranks_of(state, role) if state.members[ProcessId(role, rank)].phase is MemberPhase.STARTING
        ]
        if starting:
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
    """Every process that is up: members, the trainer, standbys, those that are becoming members included."""
    located = {process_id: member.process for process_id, member in state.members.items()}
    located[TRAINER_ID] = state.trainer.process
    for role, pool in state.standbys.items():
        located |= {ProcessId.standby(role, number): standby.process for number, standby in pool.items()}
    return {process_id: process for process_id, process in located.items() if process is not None}
