"""The brain: ``step(state, event) -> (state, commands)``. Pure, total and deterministic.

An event of another incarnation than the current one, or one that the phase does not expect, changes nothing: one
failure leads to exactly one restart, whatever else is reported afterwards.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dlrover.python.rl.control.events import (
    Cause,
    Command,
    Event,
    Failed,
    MemberStarted,
    Place,
    Placed,
    Release,
    Released,
    RestartDue,
    StartMembers,
    StartTrainer,
    StopRequested,
    Submitted,
    TrainerFinished,
    TrainerStarted,
    WaitThenRestart,
)
from dlrover.python.rl.control.state import JobState, Phase, Process

MAX_BACKOFF_S = 60.0
MAX_DOUBLINGS = 64

Result = tuple[JobState, tuple[Command, ...]]


def step(state: JobState, event: Event) -> Result:
    """Take one event in; return the new state and what shall be done."""
    incarnation = getattr(event, "incarnation", state.incarnation)
    if state.phase.terminal or incarnation != state.incarnation:
        return state, ()
    if state.terms is None and not isinstance(event, Submitted | StopRequested):
        return state, ()
    handler = _HANDLERS[type(event)]
    return handler(state, event)


def replay(events: Iterable[Event]) -> JobState:
    """The state that a journal's events lead to."""
    state = JobState()
    for event in events:
        state, _ = step(state, event)
    return state


def _submitted(state: JobState, event: Submitted) -> Result:
    if state.terms is not None:
        return state, ()
    return _begin(replace(state, terms=event))


def _begin(state: JobState) -> Result:
    number = state.incarnation + 1
    fresh = replace(state, phase=Phase.CREATED, incarnation=number, members={}, trainer=None, released=False)
    return fresh, (Place(number),)


def _placed(state: JobState, event: Placed) -> Result:
    if state.phase is not Phase.CREATED:
        return state, ()
    return replace(state, phase=Phase.PLACED), (StartMembers(event.incarnation),)


def _member_started(state: JobState, event: MemberStarted) -> Result:
    who = f"{event.role}[{event.rank}]"
    if state.phase is not Phase.PLACED or who in state.members or state.terms is None:
        return state, ()
    members = {**state.members, who: Process(event.node, event.pid)}
    complete = len(members) == sum(state.terms.roles.values())
    return replace(state, members=members), (StartTrainer(event.incarnation),) if complete else ()


def _trainer_started(state: JobState, event: TrainerStarted) -> Result:
    if state.phase is not Phase.PLACED:
        return state, ()
    return replace(state, phase=Phase.RUNNING, trainer=Process(event.node, event.pid)), ()


def _trainer_finished(state: JobState, event: TrainerFinished) -> Result:
    if state.phase is not Phase.RUNNING:
        return state, ()
    return _end(state, Phase.FINISHED, "the trainer returned")


def _failed(state: JobState, event: Failed) -> Result:
    if state.phase not in (Phase.CREATED, Phase.PLACED, Phase.RUNNING):
        return state, ()
    cause = event.cause
    state = replace(state, causes=(*state.causes, cause))
    refusal = _no_restart(state, cause)
    if refusal:
        return _end(state, Phase.FAILED, f"{cause.who}: {cause.message}{refusal}")
    counts = {**state.restarts_by, cause.role: state.restarts_by.get(cause.role, 0) + 1}
    restarting = replace(state, phase=Phase.RESTARTING, restarts_by=counts, members={}, trainer=None)
    return restarting, (Release(event.incarnation),)


def _no_restart(state: JobState, cause: Cause) -> str:
    """Why the job is not restarted after ``cause``: text for the reason, ``""`` when it is."""
    terms = state.terms
    if terms is None or not cause.retryable:
        return f" ({cause.kind.value} is not retried)"
    limits = {"trainer": terms.trainer_max_restart, **terms.workload_max_restart}
    limit = limits.get(cause.role, terms.job_max_restart)
    if state.restarts_by.get(cause.role, 0) >= limit:
        return f" (the limit of {limit} restarts for {cause.role} is reached)"
    if state.restarts >= terms.job_max_restart:
        return f" (the limit of {terms.job_max_restart} restarts of the job is reached)"
    return ""


def _stop_requested(state: JobState, event: StopRequested) -> Result:
    if state.phase is Phase.ENDING:
        return state, ()
    if state.incarnation == 0:
        return replace(state, phase=Phase.STOPPED, outcome=Phase.STOPPED, reason=event.reason), ()
    return _end(state, Phase.STOPPED, event.reason)


def _end(state: JobState, outcome: Phase, reason: str) -> Result:
    return replace(state, phase=Phase.ENDING, outcome=outcome, reason=reason), (Release(state.incarnation),)


def _released(state: JobState, event: Released) -> Result:
    if state.phase is Phase.ENDING and state.outcome is not None:
        return replace(state, phase=state.outcome, members={}, trainer=None, released=True), ()
    if state.phase is Phase.RESTARTING and state.terms is not None and not state.released:
        # Bounded: a float cannot hold 2 to the power of every restart limit.
        doublings = min(state.restarts - 1, MAX_DOUBLINGS)
        delay_s = min(state.terms.backoff_s * 2**doublings, MAX_BACKOFF_S)
        return replace(state, released=True), (WaitThenRestart(event.incarnation, delay_s),)
    return state, ()


def _restart_due(state: JobState, event: RestartDue) -> Result:
    return _begin(state) if state.phase is Phase.RESTARTING and state.released else (state, ())


_HANDLERS: dict[type, Callable[[JobState, Any], Result]] = {
    Submitted: _submitted,
    Placed: _placed,
    MemberStarted: _member_started,
    TrainerStarted: _trainer_started,
    TrainerFinished: _trainer_finished,
    Failed: _failed,
    Released: _released,
    RestartDue: _restart_due,
    StopRequested: _stop_requested,
}
