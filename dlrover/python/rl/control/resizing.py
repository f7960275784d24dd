# SPDX-License-Identifier: Apache-2.0
"""Another number of members for a stateless role, while the job runs.

Trainer and role begin anew, as if both had been lost after the last commit: every member of the role learns its new
world size, and the trainer its new members. All other members, and all committed steps, stay. It charges no budget.
"""

from dataclasses import replace

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.commands import Command, KillTrainer
from dlrover.python.rl.control.events import RecoveryScope, Resized, Submitted
from dlrover.python.rl.control.recovery import begin_incarnation, kill_members
from dlrover.python.rl.control.state import (
    JobState,
    Member,
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
    if not can_resize(state, event.role) or event.num < 1 or event.num == settings.roles[event.role].num:
        return state, ()
    state, killed = _with_ranks(state, settings, event.role, event.num)
    state, started = start_members(state, event.role, ranks_of(state, event.role))
    state, restarted = _restart_trainer(state, f"{event.role} was resized to {event.num}")
    return state, (*killed, *started, *restarted)


def _with_ranks(state: JobState, settings: Submitted, role: str, num: int) -> Result:
    """End the role's members, and give it ``num`` that wait for their start. A rank that comes again goes on with its
    numbers: two processes never have the same one."""
    old = range(settings.roles[role].num)
    killed = kill_members(state, role, old)
    state = begin_incarnation(state, role, old)
    ids = [ProcessId(role, rank) for rank in range(num)]
    kept = {process_id: state.members[process_id] for process_id in ids if process_id in state.members}
    added = {process_id: Member(state.retired.get(process_id, 1)) for process_id in ids if process_id not in kept}
    others = {process_id: member for process_id, member in state.members.items() if process_id.role != role}
    gone = {ProcessId(role, rank): state.members[ProcessId(role, rank)].incarnation for rank in old[num:]}
    roles = {**settings.roles, role: replace(settings.roles[role], num=num)}
    return replace(
        state,
        settings=replace(settings, roles=roles),
        members={**others, **kept, **added},
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
