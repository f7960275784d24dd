# SPDX-License-Identifier: Apache-2.0
"""The result of a failure: a recovery by scope once steps are open, a restart of the whole job before, or its end.

An event names the incarnation or epoch that it concerns. The recovery raises that number at once, so further reports of
the same death concern a number of the past and change nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import TypeAlias

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.control import events
from dlrover.python.rl.control.commands import Command, Kill, Release
from dlrover.python.rl.control.events import LEFT_ALIVE, Cause, CauseKind, Process, RecoveryScope, Submitted
from dlrover.python.rl.control.state import (
    EndReason,
    JobState,
    MemberMap,
    MemberPhase,
    Phase,
    Result,
    StandbyPhase,
    Trainer,
    add_standby,
    drop_standby,
    has_lost_too_many_standbys,
    ranks_of,
    standby_subject,
    start_members,
    start_trainer,
    wait,
)

MAX_BACKOFF_S = 60.0
MAX_DOUBLINGS = 64
MAX_CAUSES = 100

NODE_FAULTS = frozenset({CauseKind.PROCESS_DIED, CauseKind.OUT_OF_MEMORY, CauseKind.HUNG, CauseKind.DEVICE_FAILED})
"""Causes that may be the node's fault."""

SLOW_WINDOWS, SLOW_FACTOR = 24, 4
"""A node is also faulty if it loses ``SLOW_FACTOR`` times the limit within ``SLOW_WINDOWS``, and others do not."""


def charge(
    state: JobState, settings: Submitted, cause: Cause, subjects: Iterable[str], at_s: float
) -> tuple[JobState, str]:
    """Record one restart of each subject; return the first limit that forbids it, ``""`` if none does. Limits count
    restarts without progress; a role without one has the job's limit, for each worker that restarts alone."""
    if cause.kind is CauseKind.PREEMPTED:
        return state, ""
    history = dict(state.history)
    for subject in subjects:
        role = settings.roles.get(subject)
        if subject == "trainer":
            limit = settings.trainer_max_restart
        elif role is None:
            limit = settings.job_max_restart
        elif role.max_restart is not None:
            limit = role.max_restart
        else:
            limit = settings.job_max_restart * (max(role.num, 1) if role.scope is RecoveryScope.MEMBER else 1)
        recent = within(history.get(subject, ()), settings.window_s, at_s)
        if len(recent) >= limit:
            return state, f"the limit of {limit} restarts for {subject} is reached"
        history[subject] = (*recent, at_s)
    return replace(state, history=history), ""


def within(times: tuple[float, ...], window_s: float, at_s: float) -> tuple[float, ...]:
    if not times or times[0] > at_s - window_s:
        return times
    return tuple(time_s for time_s in times if time_s > at_s - window_s)


def lengthen(state: JobState, settings: Submitted, subject: str, at_s: float) -> JobState:
    """Count one more recovery of ``subject`` without progress; a window without one resets the count."""
    before, last_s = state.streaks.get(subject, (0, at_s))
    count = 1 if last_s <= at_s - settings.window_s else before + 1
    return replace(state, streaks={**state.streaks, subject: (count, at_s)})


def backoff_s(state: JobState, settings: Submitted, subject: str) -> float:
    """Return the seconds before the recovery of ``subject``: none before the first, then doubling."""
    count, _ = state.streaks.get(subject, (0, 0.0))
    if count < 2:
        return 0.0
    # Bounded: a float cannot hold 2 to the power of every restart limit.
    return min(settings.backoff_s * 2.0 ** min(count - 2, MAX_DOUBLINGS), MAX_BACKOFF_S)


def note(state: JobState, cause: Cause) -> JobState:
    causes = (*state.causes, cause)
    if len(causes) > MAX_CAUSES:
        causes = (causes[0], *causes[2:])
    return replace(state, causes=causes, first_cause=state.first_cause or cause)


def exclude(state: JobState, node: str) -> JobState:
    if not node or node in state.excluded:
        return state
    return replace(state, excluded=(*state.excluded, node))


def blame(state: JobState, settings: Submitted, node: str, cause: Cause, at_s: float) -> JobState:
    """Count a process lost on ``node``, and exclude the node after too many, unless it is the only one in use."""
    if not node or node in state.excluded or cause.kind not in NODE_FAULTS:
        return state
    limit, long_s = settings.node_max_failures, SLOW_WINDOWS * settings.window_s
    losses = {each: within(times, long_s, at_s) for each, times in state.node_losses.items()}
    losses[node] = (*losses.get(node, ()), at_s)[-SLOW_FACTOR * limit :]
    state = replace(state, node_losses={each: times for each, times in losses.items() if times})
    is_fast = len(within(losses[node], settings.window_s, at_s)) >= limit
    if not is_fast and len(losses[node]) < SLOW_FACTOR * limit:
        return state
    members = (member.process for member in state.members.values())
    standbys = (standby.process for pool in state.standbys.values() for standby in pool.values())
    processes = chain(members, standbys, (state.trainer.process,))
    in_use = {process.node for process in processes if process is not None} - {"", node, *state.excluded}
    # If all nodes lose processes, the job is at fault; if the losses follow its processes, nodes must not run out.
    usual = median(len(state.node_losses.get(other, ())) for other in in_use) if in_use else 0
    stands_out = len(state.node_losses[node]) >= 2 * usual and len(state.excluded) < len(in_use)
    return exclude(state, node) if in_use and (is_fast or stands_out) else state


_IN_FRESH_PROCESSES = frozenset({CauseKind.UNKNOWN_ERROR, CauseKind.DEVICE_FAILED})


Lost: TypeAlias = Mapping[str, Sequence[int]]
"""The processes that one event reports as lost: role to ranks, then "trainer" to none. Empty: the job as a whole."""


def recover(state: JobState, settings: Submitted, cause: Cause, lost: Lost, at_s: float) -> Result:
    if cause.kind is CauseKind.UNKNOWN_ERROR:
        if any(cause.is_like(earlier) for earlier in state.tried):
            return fail(state, cause.as_users(), EndReason.NOT_RETRYABLE, "again, in fresh processes")
        state = replace(state, tried=(*state.tried, cause))
    elif not cause.retryable:
        return fail(state, cause, EndReason.NOT_RETRYABLE, f"{cause.kind.value} is not retried")
    if not state.opened or not lost:
        return _restart_job(state, settings, cause, lost, at_s)
    state = note(state, cause)
    state, refusal = charge(state, settings, cause, lost, at_s)
    if refusal:
        return fail(state, state.first_cause or cause, EndReason.RESTART_LIMIT, refusal)
    commands: tuple[Command, ...] = ()
    for role, ranks in lost.items():
        if cause.kind in LEFT_ALIVE:
            commands += kill_members(state, role, ranks)
        if role == "trainer":
            state = replace(state, recoveries=_count(state.recoveries, role))
            state = lengthen(state, settings, role, at_s)
            reason = f"{cause.who}: {cause.message}"
            state, more = restart_trainer(state, reason, backoff_s(state, settings, role))
        elif settings.roles[role].scope is RecoveryScope.GROUP:
            state, more = _recover_group(state, settings, role, ranks, cause.kind, at_s)
        else:
            state, more = _recover_members(state, settings, role, ranks, at_s)
        commands += more
    return state, commands


def _count(counts: Mapping[str, int], subject: str, more: int = 1) -> dict[str, int]:
    return {**counts, subject: counts.get(subject, 0) + more}


def member_lost(state: JobState, settings: Submitted, event: events.MemberLost, at_s: float) -> Result:
    member = state.members.get(ProcessId(event.role, event.rank))
    if not state.phase.live or member is None or member.incarnation != event.incarnation:
        return state, ()
    if member.phase is MemberPhase.WAITING:
        return state, ()
    state = blame(state, settings, _node(event.node, member.process), event.cause, at_s)
    return recover(state, settings, event.cause, {event.role: (event.rank,)}, at_s)


def trainer_lost(state: JobState, settings: Submitted, event: events.TrainerLost, at_s: float) -> Result:
    """Recover a trainer that is gone or whose code raised. If a worker is the cause, that one is charged."""
    trainer = state.trainer
    if not state.phase.live or state.epoch != event.epoch or trainer.phase is MemberPhase.WAITING:
        return state, ()
    state = blame(state, settings, _node(event.node, trainer.process), event.cause, at_s)
    role = event.cause.role
    if role in settings.roles and not state.opened:
        return recover(state, settings, event.cause, {role: ()}, at_s)
    if role in settings.roles and event.cause.kind is CauseKind.UNKNOWN_ERROR:
        rank = ProcessId.parse(event.cause.who).rank
        member = state.members.get(ProcessId(role, rank))
        if member is not None and member.phase is not MemberPhase.WAITING:
            return recover(state, settings, event.cause, {role: (rank,), "trainer": ()}, at_s)
    return recover(state, settings, event.cause, {"trainer": ()}, at_s)


def standby_lost(state: JobState, settings: Submitted, event: events.StandbyLost, at_s: float) -> Result:
    """Replace a lost standby, or recover the worker that it was becoming."""
    standby = state.standbys.get(event.role, {}).get(event.number)
    if not state.phase.live or standby is None or standby.phase is StandbyPhase.WAITING:
        return state, ()
    state = blame(state, settings, _node(event.node, standby.process), event.cause, at_s)
    if standby.phase is StandbyPhase.TAKING:
        rank = _taken_by(state, event.role, event.number)
        return recover(state, settings, event.cause, {event.role: (rank,)}, at_s)
    return _replace_standby(state, settings, event.role, event.number, at_s)


def node_lost(state: JobState, settings: Submitted, event: events.NodeLost, at_s: float) -> Result:
    """Recover all processes of a node at once: one failure."""
    if state.phase is Phase.ENDING:
        return state, ()
    state = exclude(state, event.node)
    if not state.phase.live:
        return state, ()

    def is_lost(process: Process | None) -> bool:
        return process is not None and process.node == event.node

    lost: dict[str, list[int]] = {}
    for process_id, member in state.members.items():
        if is_lost(member.process):
            lost.setdefault(process_id.role, []).append(process_id.rank)
    pools = state.standbys.items()
    standbys = [(role, *entry) for role, pool in pools for entry in pool.items() if is_lost(entry[1].process)]
    commands: tuple[Command, ...] = ()
    for role, number, standby in standbys:
        if standby.phase is StandbyPhase.TAKING:
            lost.setdefault(role, []).append(_taken_by(state, role, number))
        else:
            state, more = _replace_standby(state, settings, role, number, at_s)
            commands += more
    if is_lost(state.trainer.process):
        lost["trainer"] = []
    if not lost:
        return state, commands
    state, more = recover(state, settings, event.cause, lost, at_s)
    return state, commands + more if state.phase.live else more


def failed(state: JobState, settings: Submitted, event: events.Failed, at_s: float) -> Result:
    if state.phase is Phase.ENDING or (state.phase is Phase.RESTARTING and event.cause.retryable):
        return state, ()
    return recover(state, settings, event.cause, {}, at_s)


def _node(reported: str, process: Process | None) -> str:
    return reported or (process.node if process is not None else "")


def _taken_by(state: JobState, role: str, number: int) -> int:
    """Return the rank that a standby is becoming."""
    return next(rank for rank in ranks_of(state, role) if state.members[ProcessId(role, rank)].standby == number)


def _replace_standby(state: JobState, settings: Submitted, role: str, number: int, at_s: float) -> Result:
    """Start another standby after a back-off, unless too many were lost."""
    subject = standby_subject(role)
    state = lengthen(drop_standby(state, role, number), settings, subject, at_s)
    kill = Kill(ProcessId.standby(role, number))
    if has_lost_too_many_standbys(state, role):
        return state, (kill,)
    state, commands = add_standby(state, role, backoff_s(state, settings, subject))
    return state, (kill, *commands)


def completed_recoveries(state: JobState) -> dict[str, int]:
    """Return the number of each subject's recoveries that are complete."""
    roles = state.settings.roles if state.settings is not None else {}
    under_way = Counter(process_id.role for process_id, member in state.members.items() if member.process is None)
    for role, settings in roles.items():
        if settings.scope is RecoveryScope.GROUP:
            under_way[role] = min(under_way[role], 1)
    under_way["trainer"] = int(state.trainer.process is None)
    completed = {subject: count - under_way[subject] for subject, count in state.recoveries.items()}
    return {subject: count for subject, count in completed.items() if count > 0}


def _recover_members(state: JobState, settings: Submitted, role: str, ranks: Sequence[int], at_s: float) -> Result:
    state = begin_incarnation(state, role, ranks)
    state = replace(state, recoveries=_count(state.recoveries, role, len(ranks)))
    at_once, commands = [], ()  # type: list[int], tuple[Command, ...]
    for rank in ranks:
        process_id = ProcessId(role, rank)
        state = lengthen(state, settings, str(process_id), at_s)
        delay_s = backoff_s(state, settings, str(process_id))
        if delay_s:
            state, more = wait(state, f"{process_id}#{state.members[process_id].incarnation}", delay_s)
            commands += more
        else:
            at_once.append(rank)
    if at_once:
        state, more = start_members(state, role, at_once)
        commands += more
    return state, commands


def _recover_group(
    state: JobState, settings: Submitted, role: str, lost: Sequence[int], kind: CauseKind, at_s: float
) -> Result:
    """Restart all workers of the role; survivors are ended first, or rejoin in their processes."""
    ranks = ranks_of(state, role)
    survivors = [rank for rank in ranks if rank not in set(lost)]
    rejoining = [] if kind in _IN_FRESH_PROCESSES else _rejoining_ranks(state, settings, role, survivors)
    killed = kill_members(state, role, [rank for rank in survivors if rank not in rejoining])
    state = begin_incarnation(state, role, ranks, rejoining)
    state = lengthen(replace(state, recoveries=_count(state.recoveries, role)), settings, role, at_s)
    delay_s = backoff_s(state, settings, role)
    if delay_s:
        number = state.members[ProcessId(role, 0)].incarnation
        state, commands = wait(state, f"{role}#{number}", delay_s)
    else:
        state, commands = start_members(state, role, ranks, spared=survivors)
    return state, killed + commands


def _rejoining_ranks(state: JobState, settings: Submitted, role: str, survivors: Sequence[int]) -> list[int]:
    """Return the ranks that continue in their processes: all that are up on nodes in use, but none if the role was also
    lost since the last progress, since they may be the cause."""
    if not settings.roles[role].rejoins or role in state.streaks:
        return []
    members = {rank: state.members[ProcessId(role, rank)] for rank in survivors}
    up = {rank: member.process for rank, member in members.items() if member.phase is MemberPhase.UP}
    return [rank for rank, process in up.items() if process is not None and process.node not in state.excluded]


def restart_trainer(state: JobState, reason: str, delay_s: float = 0.0) -> Result:
    """Restart the trainer alone; the workers keep their state."""
    killed = Kill(TRAINER_ID, state.epoch)
    trainer = Trainer(fresh=False, reason=reason)
    state = replace(state, epoch=state.epoch + 1, trainer=trainer)
    state, commands = wait(state, f"trainer#{state.epoch}", delay_s) if delay_s else start_trainer(state)
    return state, (killed, *commands)


def kill_members(state: JobState, role: str, ranks: Sequence[int]) -> tuple[Command, ...]:
    members = {process_id: state.members[process_id] for process_id in (ProcessId(role, rank) for rank in ranks)}
    running = {each: member for each, member in members.items() if member.phase is not MemberPhase.WAITING}
    return tuple(Kill(process_id, member.incarnation) for process_id, member in running.items())


def begin_incarnation(state: JobState, role: str, ranks: Sequence[int], rejoining: Sequence[int] = ()) -> JobState:
    """Give workers their next incarnation, ``rejoining`` ones in their processes; drop standbys that were becoming
    one of them."""
    changes = {}
    for process_id in (ProcessId(role, rank) for rank in ranks):
        member = state.members[process_id]
        if member.standby >= 0:
            state = drop_standby(state, role, member.standby)
        changes[process_id] = member.next(in_its_process=process_id.rank in rejoining)
    return replace(state, members=state.members.replacing(changes))


def _restart_job(state: JobState, settings: Submitted, cause: Cause, lost: Lost, at_s: float) -> Result:
    """Release this incarnation; its events are ignored from now on."""
    subjects = (*lost, "job")
    state = note(state, cause)
    state, refusal = charge(state, settings, cause, subjects, at_s)
    if refusal:
        return fail(state, state.first_cause or cause, EndReason.RESTART_LIMIT, refusal)
    state = lengthen(state, settings, "job", at_s)
    state = replace(
        state,
        phase=Phase.RESTARTING,
        epoch=state.epoch + 1,
        members=MemberMap({process_id: member.next() for process_id, member in state.members.items()}),
        standbys={},
        trainer=Trainer(reason=f"{cause.who}: {cause.message}"),
        opened=False,
        waits={},
        restarts_by=_count(state.restarts_by, subjects[0]),
    )
    return state, (Release(state.incarnation, final=False),)


def fail(state: JobState, cause: Cause, why: EndReason, detail: str) -> Result:
    if cause not in state.causes:
        state = note(state, cause)
    state = replace(state, failure=cause)
    return end(state, Phase.FAILED, why, f"{cause.who}: {cause.message} ({detail})")


def end(state: JobState, outcome: Phase, why: EndReason, reason: str) -> Result:
    """Decide the outcome and release everything."""
    # A release that is under way leaves shared memory: a new number tells its answer from the final release's.
    number = state.incarnation + (state.phase is Phase.RESTARTING and not state.released)
    state = replace(
        state,
        phase=Phase.ENDING,
        incarnation=number,
        outcome=outcome,
        ended_by=why,
        reason=reason,
        waits={},
        released=False,
    )
    return state, (Release(number, final=True),)
