# SPDX-License-Identifier: Apache-2.0
"""The state machine of a job: ``step(state, event, at_s) -> (state, commands)``. Pure, total and deterministic.

An event of another incarnation or epoch than the current one, or one that the phase does not expect, returns the same
state object: one death leads to exactly one recovery, however often it is reported.

A master that restarts handles :class:`MasterStarted`, adopts the processes that are up, ends every other process of the
run, and then executes the :func:`outstanding` commands."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dlrover.python.rl.common.names import ProcessId, ProcessKind
from dlrover.python.rl.control import events, recovery
from dlrover.python.rl.control.commands import Command, Place, Release
from dlrover.python.rl.control.events import Event, RecoveryScope, Submitted
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
    """Handle one event at ``at_s`` seconds. If it returns the same state object, the event need not be journalled."""
    if state.phase.terminal:
        return state, ()
    if isinstance(event, events.MasterStarted):
        return _master_started(state)
    if state.settings is None:
        if isinstance(event, events.StopRequested):  # a stop before the submission ends the job at once
            stopped = Phase.STOPPED
            return replace(state, phase=stopped, outcome=stopped, ended_by=EndReason.STOPPED, reason=event.reason), ()
        if not isinstance(event, Submitted):
            return state, ()
        ids = (ProcessId(role, rank) for role, settings in event.roles.items() for rank in range(settings.num))
        members = MemberMap({process_id: Member(event.first) for process_id in ids})
        return _begin(replace(state, settings=event, members=members, epoch=event.first))
    if isinstance(event, events.Placed | events.Failed | events.Released) and event.incarnation != state.incarnation:
        return state, ()
    return _HANDLERS[type(event)](state, state.settings, event, at_s)


def replay(journal: Iterable[tuple[float, Event]]) -> JobState:
    state = JobState()
    for at_s, event in journal:
        state, _ = step(state, event, at_s)
    return state


def outstanding(state: JobState) -> tuple[Command, ...]:
    """Return all commands that must be under way in this state, for a master that has just restarted."""
    if state.phase is Phase.CREATED and state.incarnation:
        return (Place(state.incarnation, state.excluded),)
    if state.phase is Phase.ENDING:
        return (Release(state.incarnation, final=True),)
    if state.phase is Phase.RESTARTING and not state.released:
        return (Release(state.incarnation, final=False),)
    return () if state.phase.terminal else under_way(state)


def _begin(state: JobState) -> Result:
    state = replace(state, phase=Phase.CREATED, incarnation=state.incarnation + 1, released=False, waits={})
    return state, (Place(state.incarnation, state.excluded),)


def _placed(state: JobState, settings: Submitted, event: events.Placed, at_s: float) -> Result:
    if state.phase is not Phase.CREATED:
        return state, ()
    state = replace(state, phase=Phase.PLACED)
    commands: tuple[Command, ...] = ()
    for role in settings.roles:
        state, more = start_members(state, role, ranks_of(state, role))
        commands += more
    state, more = _start_trainer_once_all_up(state, settings)
    return state, commands + more


def _member_started(state: JobState, settings: Submitted, event: events.MemberStarted, at_s: float) -> Result:
    """Note that a worker is up. Once all are, at the first start, the trainer and the standbys start."""
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
    if state.trainer.phase is not MemberPhase.WAITING or state.members.up < len(state.members):
        return state, ()
    state, commands = start_trainer(state)
    for role in settings.roles:
        state, more = fill_standbys(state, role)
        commands += more
    return state, commands


def _standby_ready(state: JobState, settings: Submitted, event: events.StandbyReady, at_s: float) -> Result:
    pool = state.standbys.get(event.role, {})
    standby = pool.get(event.number)
    if not state.phase.live or standby is None or standby.phase is not StandbyPhase.STARTING:
        return state, ()
    ready = replace(standby, phase=StandbyPhase.READY, process=event.process)
    return replace(state, standbys={**state.standbys, event.role: {**pool, event.number: ready}}), ()


def _trainer_event(state: JobState, settings: Submitted, event: Any, at_s: float) -> Result:
    """Handle the reports of the trainer's current epoch, even before the event that it has started."""
    is_current = state.phase.live and event.epoch == state.epoch and state.trainer.phase is not MemberPhase.WAITING
    if not is_current:
        return state, ()
    match event:
        case events.TrainerStarted() if state.trainer.phase is not MemberPhase.UP:
            trainer = replace(state.trainer, phase=MemberPhase.UP, process=event.process)
            return replace(state, phase=Phase.RUNNING, trainer=trainer), ()
        case events.StepsOpened() if not state.opened:
            return replace(state, phase=Phase.RUNNING, opened=True), ()
        case events.Progressed() if event.step != state.committed:
            return _progressed(state, settings, event, at_s), ()
        case events.TrainerFinished():
            return recovery.end(state, Phase.FINISHED, EndReason.FINISHED, "the trainer returned")
    return state, ()


def _progressed(state: JobState, settings: Submitted, event: events.Progressed, at_s: float) -> JobState:
    """Reset the streaks and refill the budgets: the recoveries before this commit have helped. A node's failures still
    count, since a faulty node lets some steps pass."""
    exhausted = [standby_subject(role) for role in settings.roles if has_lost_too_many_standbys(state, role)]
    streaks = {subject: state.streaks[subject] for subject in exhausted}
    quiet = state.first_cause is None and not state.history and len(streaks) == len(state.streaks)
    if state.committed and quiet:
        return state
    # One restart of each subject has helped.
    recent = {subject: recovery.within(times, settings.window_s, at_s) for subject, times in state.history.items()}
    state = replace(state, history={subject: times[1:] for subject, times in recent.items() if len(times) > 1})
    return replace(state, committed=event.step, streaks=streaks, first_cause=None, tried=())


def _wait_over(state: JobState, settings: Submitted, event: events.WaitOver, at_s: float) -> Result:
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


def _released(state: JobState, settings: Submitted, event: events.Released, at_s: float) -> Result:
    """End the job, or begin its next incarnation: this one is released."""
    if state.phase is Phase.ENDING and state.outcome is not None:
        members = MemberMap({process_id: Member(member.incarnation) for process_id, member in state.members.items()})
        trainer = replace(state.trainer, phase=MemberPhase.WAITING, process=None)
        return replace(state, phase=state.outcome, members=members, standbys={}, trainer=trainer, released=True), ()
    if state.phase is not Phase.RESTARTING or state.released:
        return state, ()
    state = replace(state, released=True)
    delay_s = recovery.backoff_s(state, settings, "job")
    return wait(state, f"job#{state.incarnation}", delay_s) if delay_s else _begin(state)


def _stop_requested(state: JobState, settings: Submitted, event: events.StopRequested, at_s: float) -> Result:
    if state.phase is Phase.ENDING:
        return state, ()  # the outcome stays
    return recovery.end(state, Phase.STOPPED, EndReason.STOPPED, event.reason)


def can_resize(state: JobState, role: str) -> bool:
    settings = state.settings.roles.get(role) if state.settings is not None else None
    is_open = state.phase is Phase.RUNNING and state.opened
    return is_open and settings is not None and settings.scope is RecoveryScope.MEMBER


def _resized(state: JobState, settings: Submitted, event: events.Resized, at_s: float) -> Result:
    role, num = event.role, event.num
    if not can_resize(state, role) or num < 1 or num == settings.roles[role].num:
        return state, ()
    return _resize(state, settings, role, num, event.wanted, f"{role} was resized to {num}")


def _unplaced(state: JobState, settings: Submitted, event: events.Unplaced, at_s: float) -> Result:
    """Continue with one worker less if the role may have fewer; otherwise the job fails."""
    role, member = event.role, state.members.get(ProcessId(event.role, event.rank))
    is_current = member is not None and member.incarnation == event.incarnation
    if not state.phase.live or not is_current:
        return state, ()
    num, least = settings.roles[role].num - 1, settings.roles[role].least
    has_begun = state.trainer.phase is not MemberPhase.WAITING and not state.opened
    if not least or num < least or has_begun:
        return recovery.recover(state, settings, event.cause, {}, at_s)
    wanted = max(state.wanted.get(role, 0), num + 1)
    return _resize(state, settings, role, num, wanted, f"there was no place for a worker of {role}")


def _resize(state: JobState, settings: Submitted, role: str, num: int, wanted: int, why: str) -> Result:
    """End the role's workers, start ``num``, and restart the trainer, as if all had been lost after the last commit;
    other roles and all commits stay. A rank that returns continues its numbers: no two processes share one."""
    lacking = {other: size for other, size in state.wanted.items() if other != role}
    state = replace(state, wanted={**lacking, role: wanted} if wanted > num else lacking)
    old = range(settings.roles[role].num)
    commands = recovery.kill_members(state, role, old)
    state = recovery.begin_incarnation(state, role, old)
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
        # The back-offs of its workers end; its standbys' continue.
        waits={timer: delay for timer, delay in state.waits.items() if not timer.startswith(f"{role}[")},
    )
    state, more = start_members(state, role, ranks_of(state, role))
    commands += more
    if state.trainer.phase is not MemberPhase.WAITING:  # else it starts after its back-off
        state, more = recovery.restart_trainer(state, why)
        commands += more
    return state, commands


def _master_started(state: JobState) -> Result:
    """Repeat the starts that were under way, since the master cannot know how far its predecessor's commands have got.

    They get the next number: no two processes share one, even if one of them is unreachable. A standby that was
    becoming a worker is dropped. No budget is charged."""
    state = replace(state, master_starts=state.master_starts + 1)
    if not state.phase.live or state.settings is None:
        return state, ()
    commands: tuple[Command, ...] = ()
    for role, settings in state.settings.roles.items():
        ranks = starting_ranks(state, role)
        if ranks and settings.scope is RecoveryScope.GROUP:
            ranks = list(ranks_of(state, role))
        killed = recovery.kill_members(state, role, ranks)
        state, more = start_members(recovery.begin_incarnation(state, role, ranks), role, ranks)
        commands += killed + more
    if state.trainer.phase is MemberPhase.STARTING:
        state, more = recovery.restart_trainer(state, state.trainer.reason)
        commands += more
    return state, commands


_HANDLERS: dict[type, Handler] = {
    Submitted: lambda state, settings, event, at_s: (state, ()),
    events.Placed: _placed,
    events.MemberStarted: _member_started,
    events.MemberLost: recovery.member_lost,
    events.StandbyReady: _standby_ready,
    events.StandbyLost: recovery.standby_lost,
    events.TrainerStarted: _trainer_event,
    events.StepsOpened: _trainer_event,
    events.Progressed: _trainer_event,
    events.TrainerFinished: _trainer_event,
    events.TrainerLost: recovery.trainer_lost,
    events.NodeLost: recovery.node_lost,
    events.Failed: recovery.failed,
    events.Released: _released,
    events.WaitOver: _wait_over,
    events.Resized: _resized,
    events.Unplaced: _unplaced,
    events.StopRequested: _stop_requested,
}
