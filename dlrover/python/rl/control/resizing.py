# SPDX-License-Identifier: Apache-2.0
"""Another number of members for a stateless role, while the job runs.

Trainer and role begin anew, as if both had been lost after the last commit: every member of the role learns its new
world size, and the trainer its new members. All other members, and all committed steps, stay. It charges no budget.

A role that may go on with fewer members shrinks when there is no place for one of them, and grows when there is again.
"""

from dataclasses import replace

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.commands import Command, KillTrainer
from dlrover.python.rl.control.events import RecoveryScope, Resized, Submitted, Unplaced
from dlrover.python.rl.control.recovery import Failure, begin_incarnation, kill_members, recover
from dlrover.python.rl.control.state import (
    JobState,
    Member,
    MemberMap,
    MemberPhase,
    Phase,
    Result,
    Trainer,
    ranks_of,
    start_members,
    start_trainer,
)


def can_resize(state: JobState, role: str) -> bool:
    settings = state.settings.roles.get(role) if state.settings is not None else None
    is_open = state.phase is Phase.RUNNING and state.opened
    return is_open and settings is not None and settings.scope is RecoveryScope.MEMBER


def resized(state: JobState, settings: Submitted, event: Resized, at_s: float) -> Result:
    role, num = event.role, event.num
    if not can_resize(state, role) or num < 1 or num == settings.roles[role].num:
        return state, ()
    return _resize(state, settings, role, num, event.wanted, f"{role} was resized to {num}")


def unplaced(state: JobState, settings: Submitted, event: Unplaced, at_s: float) -> Result:
    """One member less, while the job may go on so; else the job fails for want of resources."""
    role, member = event.role, state.members.get(ProcessId(event.role, event.rank))
    is_current = member is not None and member.incarnation == event.incarnation
    if not state.phase.live or not is_current:
        return state, ()
    num, least = settings.roles[role].num - 1, settings.roles[role].least
    has_begun = state.trainer.phase is not MemberPhase.WAITING and not state.opened
    if not least or num < least or has_begun:
        return recover(state, settings, Failure(event.cause), at_s)
    wanted = max(state.wanted.get(role, 0), num + 1)
    return _resize(state, settings, role, num, wanted, f"there was no place for a member of {role}")


def _resize(state: JobState, settings: Submitted, role: str, num: int, wanted: int, why: str) -> Result:
    others = {other: size for other, size in state.wanted.items() if other != role}
    state = replace(state, wanted={**others, role: wanted} if wanted > num else others)
    state, killed = _with_ranks(state, settings, role, num)
    state, started = start_members(state, role, ranks_of(state, role))
    state, restarted = _restart_trainer(state, why)
    return state, (*killed, *started, *restarted)


def _with_ranks(state: JobState, settings: Submitted, role: str, num: int) -> Result:
    """End the role's members, and give it ``num`` that wait for their start. A rank that comes again goes on with its
    numbers: two processes never have the same one."""
    old = range(settings.roles[role].num)
    killed = kill_members(state, role, old)
    state = begin_incarnation(state, role, old)
    ids = [ProcessId(role, rank) for rank in range(num)]
    kept = {process_id: state.members[process_id] for process_id in ids if process_id in state.members}
    first, added_ids = settings.first, [process_id for process_id in ids if process_id not in kept]
    added = {process_id: Member(state.retired.get(process_id, first)) for process_id in added_ids}
    others = {process_id: member for process_id, member in state.members.items() if process_id.role != role}
    gone = {ProcessId(role, rank): state.members[ProcessId(role, rank)].incarnation for rank in old[num:]}
    roles = {**settings.roles, role: replace(settings.roles[role], num=num)}
    return replace(
        state,
        settings=replace(settings, roles=roles),
        members=MemberMap({**others, **kept, **added}),
        retired={**{key: number for key, number in state.retired.items() if key not in added}, **gone},
        most={**state.most, role: max(num, len(old), state.most.get(role, 0))},
        waits={timer: delay for timer, delay in state.waits.items() if not _is_of_member(timer, role)},
    ), killed


def _is_of_member(timer: str, role: str) -> bool:
    """Return True for the back-off of one of the role's members, and not of its standbys."""
    return timer.startswith(f"{role}[")


def _restart_trainer(state: JobState, why: str) -> Result:
    """One that waits for its back-off starts after that."""
    if state.trainer.phase is MemberPhase.WAITING:
        return state, ()
    killed: tuple[Command, ...] = (KillTrainer(state.epoch),)
    state = replace(state, epoch=state.epoch + 1, trainer=Trainer(fresh=False, reason=why))
    state, commands = start_trainer(state)
    return state, killed + commands
