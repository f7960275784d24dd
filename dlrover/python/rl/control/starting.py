"""Bringing members, standbys and the trainer up: each function changes the state and gives the commands for it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dlrover.python.rl.control.commands import Command, StartMembers, StartStandby, StartTrainer, Wait
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.control.state import (
    JobState,
    Member,
    MemberPhase,
    Standby,
    StandbyPhase,
    Trainer,
    member_key,
    ranks_of,
)

Result = tuple[JobState, tuple[Command, ...]]

STANDBY_TRIES = 5
"""Standbys of a role that may be lost without progress in between; then the role does without."""


def wait(state: JobState, timer: str, delay_s: float) -> Result:
    """Let a back-off run."""
    return replace(state, waits={**state.waits, timer: delay_s}), (Wait(timer, delay_s),)


# -- members ----------------------------------------------------------------------------------------------------------


def start_members(state: JobState, role: str, ranks: Sequence[int], spared: Iterable[int] = ()) -> Result:
    """Start the waiting members ``ranks`` of a role; all but the ``spared`` ones take a ready standby where there is
    one."""
    if not ranks:
        return state, ()
    pool = state.standbys.get(role, {})
    ready = (number for number in sorted(pool) if pool[number].phase is StandbyPhase.READY)
    taking = dict(zip((rank for rank in ranks if rank not in set(spared)), ready, strict=False))
    begun = {
        member_key(role, rank): replace(
            state.members[member_key(role, rank)], phase=MemberPhase.STARTING, standby=taking.get(rank, -1)
        )
        for rank in ranks
    }
    state = replace(state, members={**state.members, **begun})
    if taking:
        taken = {number: replace(pool[number], phase=StandbyPhase.TAKING) for number in taking.values()}
        state = replace(state, standbys={**state.standbys, role: {**pool, **taken}})
    return state, (_members_command(state, role, ranks),)


def _members_command(state: JobState, role: str, ranks: Iterable[int]) -> StartMembers:
    members = {rank: state.members[member_key(role, rank)] for rank in ranks}
    return StartMembers(
        role,
        tuple((rank, member.incarnation) for rank, member in members.items()),
        {rank: member.standby for rank, member in members.items() if member.standby >= 0},
        state.excluded,
    )


def renewed(member: Member) -> Member:
    """The next incarnation of a member, not begun yet."""
    return Member(member.incarnation + 1)


# -- standbys ---------------------------------------------------------------------------------------------------------


def standby_subject(role: str) -> str:
    """What the streak of a role's standbys is kept under."""
    return f"{role} standby"


def given_up(state: JobState, role: str) -> bool:
    """Whether the role does without standbys, having lost too many."""
    streak = state.streaks.get(standby_subject(role))
    return streak is not None and streak.count >= STANDBY_TRIES


def drop_standby(state: JobState, role: str, number: int) -> JobState:
    """Forget a standby."""
    pool = state.standbys.get(role, {})
    if number not in pool:
        return state
    left = {other: standby for other, standby in pool.items() if other != number}
    return replace(state, standbys={**state.standbys, role: left})


def add_standby(state: JobState, role: str, delay_s: float = 0.0) -> Result:
    """One more standby of a role, now or after a back-off."""
    number = state.next_standby.get(role, 0)
    phase = StandbyPhase.WAITING if delay_s else StandbyPhase.STARTING
    state = replace(
        state,
        next_standby={**state.next_standby, role: number + 1},
        standbys={**state.standbys, role: {**state.standbys.get(role, {}), number: Standby(phase)}},
    )
    if delay_s:
        return wait(state, f"{standby_subject(role)}#{number}", delay_s)
    return state, (StartStandby(role, number, state.excluded),)


def start_standby(state: JobState, role: str, number: int) -> Result:
    """Start a standby whose back-off is over."""
    pool = {**state.standbys[role], number: Standby(StandbyPhase.STARTING)}
    return replace(state, standbys={**state.standbys, role: pool}), (StartStandby(role, number, state.excluded),)


def fill_standbys(state: JobState, role: str) -> Result:
    """Start as many standbys as the role is short of."""
    wanted = state.terms.roles[role].standby if state.terms is not None else 0
    commands: tuple[Command, ...] = ()
    if given_up(state, role):
        return state, commands
    for _ in range(wanted - len(state.standbys.get(role, {}))):
        state, more = add_standby(state, role)
        commands += more
    return state, commands


# -- the trainer ------------------------------------------------------------------------------------------------------


def start_trainer(state: JobState) -> Result:
    """Start the waiting trainer."""
    state = replace(state, trainer=replace(state.trainer, phase=MemberPhase.STARTING))
    return state, (_trainer_command(state),)


def _trainer_command(state: JobState) -> StartTrainer:
    trainer: Trainer = state.trainer
    return StartTrainer(state.epoch, trainer.fresh, state.epoch - 1, trainer.reason, state.excluded)


# -- after the master's own restart -----------------------------------------------------------------------------------


def under_way(state: JobState) -> tuple[Command, ...]:
    """The starts and back-offs that a live job waits for."""
    commands: list[Command] = []
    for role in state.terms.roles if state.terms is not None else ():
        starting = [
            rank
            for rank in ranks_of(state, role)
            if state.members[member_key(role, rank)].phase is MemberPhase.STARTING
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


def processes(state: JobState) -> dict[str, Process]:
    """``"ROLLOUT[1]"``, ``"trainer"`` and ``"ROLLOUT standby#2"`` to the process of each that is up."""
    found = {who: member.process for who, member in state.members.items()}
    found["trainer"] = state.trainer.process
    for role, pool in state.standbys.items():
        found |= {f"{standby_subject(role)}#{number}": standby.process for number, standby in pool.items()}
    return {who: process for who, process in found.items() if process is not None}
