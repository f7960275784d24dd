# SPDX-License-Identifier: Apache-2.0
"""The brain: ``step(state, event, at_s) -> (state, commands)``. Pure, total and deterministic.

An event of another incarnation or epoch than the current one, or one that the phase does not expect, returns the same
state object: one death leads to exactly one recovery, however often it is reported.

A master that restarts handles :class:`MasterStarted`, adopts the processes that are up, ends every other process of the
run, and then carries out the :func:`outstanding` commands.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

from dlrover.python.rl.common.names import ProcessId, ProcessKind
from dlrover.python.rl.control.commands import Command, Place, Release
from dlrover.python.rl.control.events import (
    Event,
    Failed,
    MasterStarted,
    MemberLost,
    MemberStarted,
    NodeLost,
    Placed,
    Progressed,
    RecoveryScope,
    Released,
    Resized,
    StandbyLost,
    StandbyReady,
    StepsOpened,
    StopRequested,
    Submitted,
    TrainerFinished,
    TrainerLost,
    TrainerStarted,
    Unplaced,
    WaitOver,
)
from dlrover.python.rl.control.recovery import (
    Failure,
    backoff_s,
    begin_incarnation,
    end,
    failed,
    kill_members,
    member_lost,
    node_lost,
    recover,
    restart_trainer,
    standby_lost,
    trainer_lost,
    within,
)
from dlrover.python.rl.control.state import (
    EndReason,
    JobState,
    Member,
    MemberMap,
    MemberPhase,
    Phase,
    Result,
    StandbyPhase,
    drop_standby,
    fill_standbys,
    has_lost_too_many_standbys,
    ranks_of,
    standby_subject,
    start_members,
    start_standby,
    start_trainer,
    starting_ranks,
    under_way,
    wait,
)

Handler = Callable[[JobState, Submitted, Any, float], Result]


def step(state: JobState, event: Event, at_s: float) -> Result:
    """Handle one event at ``at_s`` seconds. The same state object means that it need not be journalled."""
    if state.phase.terminal:
        return state, ()
    if isinstance(event, MasterStarted):
        return _master_started(state)
    if state.settings is None:
        if isinstance(event, StopRequested):  # a stop before the submission ends the job at once
            stopped = Phase.STOPPED
            return replace(state, phase=stopped, outcome=stopped, ended_by=EndReason.STOPPED, reason=event.reason), ()
        if not isinstance(event, Submitted):
            return state, ()
        ids = (ProcessId(role, rank) for role, settings in event.roles.items() for rank in range(settings.num))
        members = MemberMap({process_id: Member(event.first) for process_id in ids})
        return _begin(replace(state, settings=event, members=members, epoch=event.first))
    if isinstance(event, Placed | Failed | Released) and event.incarnation != state.incarnation:
        return state, ()
    return _HANDLERS[type(event)](state, state.settings, event, at_s)


def replay(events: Iterable[tuple[float, Event]]) -> JobState:
    state = JobState()
    for at_s, event in events:
        state, _ = step(state, event, at_s)
    return state


def outstanding(state: JobState) -> tuple[Command, ...]:
    """All commands that must be under way in this state, for a master that has just restarted."""
    if state.phase is Phase.CREATED and state.incarnation:
        return (Place(state.incarnation, state.excluded),)
    if state.phase is Phase.ENDING:
        return (Release(state.incarnation, final=True),)
    if state.phase is Phase.RESTARTING and not state.released:
        return (Release(state.incarnation, final=False),)
    return () if state.phase.terminal else under_way(state)


# -- the start --------------------------------------------------------------------------------------------------------


def _begin(state: JobState) -> Result:
    number = state.incarnation + 1
    fresh = replace(state, phase=Phase.CREATED, incarnation=number, released=False, waits={})
    return fresh, (Place(number, state.excluded),)


def _placed(state: JobState, settings: Submitted, event: Placed, at_s: float) -> Result:
    if state.phase is not Phase.CREATED:
        return state, ()
    state = replace(state, phase=Phase.PLACED)
    commands: tuple[Command, ...] = ()
    for role in settings.roles:
        state, more = start_members(state, role, ranks_of(state, role))
        commands += more
    state, more = _start_trainer_once_all_up(state, settings)
    return state, commands + more


def _member_started(state: JobState, settings: Submitted, event: MemberStarted, at_s: float) -> Result:
    """A worker is up. The last one of the first start makes the trainer and the standbys start."""
    process_id = ProcessId(event.role, event.rank)
    member = state.members.get(process_id)
    if not state.phase.live or member is None or member.incarnation != event.incarnation:
        return state, ()
    if member.phase is not MemberPhase.STARTING:
        return state, ()
    up = Member(event.incarnation, MemberPhase.UP, event.process, event.standby, event.born)
    state = replace(state, members=state.members.replacing({process_id: up}))
    if member.standby >= 0:
        state = drop_standby(state, event.role, member.standby)
    if state.phase is Phase.RUNNING:
        return fill_standbys(state, event.role)
    return _start_trainer_once_all_up(state, settings)


def _start_trainer_once_all_up(state: JobState, settings: Submitted) -> Result:
    if state.trainer.phase is not MemberPhase.WAITING:
        return state, ()
    if state.members.up < len(state.members):
        return state, ()
    state, commands = start_trainer(state)
    for role in settings.roles:
        state, more = fill_standbys(state, role)
        commands += more
    return state, commands


def _standby_ready(state: JobState, settings: Submitted, event: StandbyReady, at_s: float) -> Result:
    pool = state.standbys.get(event.role, {})
    standby = pool.get(event.number)
    if not state.phase.live or standby is None or standby.phase is not StandbyPhase.STARTING:
        return state, ()
    ready = replace(standby, phase=StandbyPhase.READY, process=event.process)
    return replace(state, standbys={**state.standbys, event.role: {**pool, event.number: ready}}), ()


# -- the trainer ------------------------------------------------------------------------------------------------------


_OfTrainer: TypeAlias = TrainerStarted | StepsOpened | Progressed | TrainerFinished


def _trainer_event(state: JobState, settings: Submitted, event: _OfTrainer, at_s: float) -> Result:
    """Handle what the current epoch of the trainer reports, also before the event that it has started."""
    is_current = state.phase.live and event.epoch == state.epoch and state.trainer.phase is not MemberPhase.WAITING
    if not is_current:
        return state, ()
    match event:
        case TrainerStarted() if state.trainer.phase is not MemberPhase.UP:
            trainer = replace(state.trainer, phase=MemberPhase.UP, process=event.process)
            return replace(state, phase=Phase.RUNNING, trainer=trainer), ()
        case StepsOpened() if not state.opened:
            return replace(state, phase=Phase.RUNNING, opened=True), ()
        case Progressed() if event.step != state.committed:
            return _progressed(state, settings, event, at_s), ()
        case TrainerFinished():
            return end(state, Phase.FINISHED, EndReason.FINISHED, "the trainer returned")
    return state, ()


def _progressed(state: JobState, settings: Submitted, event: Progressed, at_s: float) -> JobState:
    """A committed step resets the streaks, and refills the budgets: the recoveries before it have helped. A node's
    failures still count: a faulty one lets some steps pass."""
    exhausted = [standby_subject(role) for role in settings.roles if has_lost_too_many_standbys(state, role)]
    streaks = {subject: state.streaks[subject] for subject in exhausted}
    quiet = state.first_cause is None and not state.history and len(streaks) == len(state.streaks)
    if state.committed and quiet:
        return state
    # One restart of each subject has helped.
    recent = {subject: within(times, settings.window_s, at_s) for subject, times in state.history.items()}
    state = replace(state, history={subject: times[1:] for subject, times in recent.items() if len(times) > 1})
    return replace(state, committed=event.step, streaks=streaks, first_cause=None, tried=())


# -- back-offs and the end --------------------------------------------------------------------------------------------


def _wait_over(state: JobState, settings: Submitted, event: WaitOver, at_s: float) -> Result:
    if event.timer not in state.waits:
        return state, ()
    state = replace(state, waits={timer: delay for timer, delay in state.waits.items() if timer != event.timer})
    subject, _, _ = event.timer.rpartition("#")
    if subject == "job":
        return _begin(state)
    if subject == "trainer":
        return start_trainer(state)
    if subject in settings.roles:
        return start_members(state, subject, ranks_of(state, subject))
    process_id = ProcessId.parse(subject)
    if process_id.kind is ProcessKind.STANDBY:
        return start_standby(state, process_id.role, process_id.rank)
    return start_members(state, process_id.role, (process_id.rank,))


def _released(state: JobState, settings: Submitted, event: Released, at_s: float) -> Result:
    """The incarnation is released: the job has ended, or its next incarnation begins."""
    if state.phase is Phase.ENDING and state.outcome is not None:
        members = MemberMap({process_id: Member(member.incarnation) for process_id, member in state.members.items()})
        trainer = replace(state.trainer, phase=MemberPhase.WAITING, process=None)
        return replace(state, phase=state.outcome, members=members, standbys={}, trainer=trainer, released=True), ()
    if state.phase is not Phase.RESTARTING or state.released:
        return state, ()
    state = replace(state, released=True)
    delay_s = backoff_s(state, settings, "job")
    return wait(state, f"job#{state.incarnation}", delay_s) if delay_s else _begin(state)


def _stop_requested(state: JobState, settings: Submitted, event: StopRequested, at_s: float) -> Result:
    """A decided outcome stays."""
    if state.phase is Phase.ENDING:
        return state, ()
    return end(state, Phase.STOPPED, EndReason.STOPPED, event.reason)


# -- another number of workers for a stateless role -------------------------------------------------------------------


def can_resize(state: JobState, role: str) -> bool:
    settings = state.settings.roles.get(role) if state.settings is not None else None
    is_open = state.phase is Phase.RUNNING and state.opened
    return is_open and settings is not None and settings.scope is RecoveryScope.MEMBER


def _resized(state: JobState, settings: Submitted, event: Resized, at_s: float) -> Result:
    role, num = event.role, event.num
    if not can_resize(state, role) or num < 1 or num == settings.roles[role].num:
        return state, ()
    return _resize(state, settings, role, num, event.wanted, f"{role} was resized to {num}")


def _unplaced(state: JobState, settings: Submitted, event: Unplaced, at_s: float) -> Result:
    """One worker less, while the job may go on so; else the job fails for want of resources."""
    role, member = event.role, state.members.get(ProcessId(event.role, event.rank))
    is_current = member is not None and member.incarnation == event.incarnation
    if not state.phase.live or not is_current:
        return state, ()
    num, least = settings.roles[role].num - 1, settings.roles[role].least
    has_begun = state.trainer.phase is not MemberPhase.WAITING and not state.opened
    if not least or num < least or has_begun:
        return recover(state, settings, Failure(event.cause), at_s)
    wanted = max(state.wanted.get(role, 0), num + 1)
    return _resize(state, settings, role, num, wanted, f"there was no place for a worker of {role}")


def _resize(state: JobState, settings: Submitted, role: str, num: int, wanted: int, why: str) -> Result:
    """End the role's workers, start ``num``, and restart the trainer, as if all had been lost after the last commit;
    the other workers and all commits stay. A rank that comes again continues its numbers: two processes never have the
    same one."""
    lacking = {other: size for other, size in state.wanted.items() if other != role}
    state = replace(state, wanted={**lacking, role: wanted} if wanted > num else lacking)
    old = range(settings.roles[role].num)
    commands = kill_members(state, role, old)
    state = begin_incarnation(state, role, old)
    ids = [ProcessId(role, rank) for rank in range(num)]
    again = {process_id: state.members[process_id] for process_id in ids if process_id in state.members}
    first, added_ids = settings.first, [process_id for process_id in ids if process_id not in again]
    added = {process_id: Member(state.retired.get(process_id, first)) for process_id in added_ids}
    unchanged = {process_id: member for process_id, member in state.members.items() if process_id.role != role}
    gone = {ProcessId(role, rank): state.members[ProcessId(role, rank)].incarnation for rank in old[num:]}
    roles = {**settings.roles, role: replace(settings.roles[role], num=num)}
    state = replace(
        state,
        settings=replace(settings, roles=roles),
        members=MemberMap({**unchanged, **again, **added}),
        retired={**{key: number for key, number in state.retired.items() if key not in added}, **gone},
        most={**state.most, role: max(num, len(old), state.most.get(role, 0))},
        # The back-offs of its workers end, and its standbys keep theirs.
        waits={timer: delay for timer, delay in state.waits.items() if not timer.startswith(f"{role}[")},
    )
    state, more = start_members(state, role, ranks_of(state, role))
    commands += more
    if state.trainer.phase is not MemberPhase.WAITING:  # else it starts after its back-off
        state, more = restart_trainer(state, why)
        commands += more
    return state, commands


# -- the master -------------------------------------------------------------------------------------------------------


def _master_started(state: JobState) -> Result:
    """The master is back and cannot know what its predecessor's last commands have started.

    So workers and a trainer that were starting start again under the next number: two processes never carry the same
    one, even when one of them is unreachable. A standby that was becoming a worker is dropped. No budget is charged.
    """
    state = replace(state, master_starts=state.master_starts + 1)
    if not state.phase.live or state.settings is None:
        return state, ()
    commands: tuple[Command, ...] = ()
    for role, settings in state.settings.roles.items():
        ranks = starting_ranks(state, role)
        if ranks and settings.scope is RecoveryScope.GROUP:
            ranks = list(ranks_of(state, role))
        killed = kill_members(state, role, ranks)
        state, more = start_members(begin_incarnation(state, role, ranks), role, ranks)
        commands += killed + more
    if state.trainer.phase is MemberPhase.STARTING:
        state, more = restart_trainer(state, state.trainer.reason)
        commands += more
    return state, commands


_HANDLERS: dict[type, Handler] = {
    Submitted: lambda state, settings, event, at_s: (state, ()),
    Placed: _placed,
    MemberStarted: _member_started,
    MemberLost: member_lost,
    StandbyReady: _standby_ready,
    StandbyLost: standby_lost,
    TrainerStarted: _trainer_event,
    StepsOpened: _trainer_event,
    Progressed: _trainer_event,
    TrainerFinished: _trainer_event,
    TrainerLost: trainer_lost,
    NodeLost: node_lost,
    Failed: failed,
    Released: _released,
    WaitOver: _wait_over,
    Resized: _resized,
    Unplaced: _unplaced,
    StopRequested: _stop_requested,
}
