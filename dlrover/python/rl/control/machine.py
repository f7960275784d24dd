"""The brain: ``step(state, event, at_s) -> (state, commands)``. Pure, total and deterministic.

An event of another incarnation or epoch than the current one, or one that the phase does not expect, changes nothing
and gives back the very same state: one death leads to exactly one recovery, whatever else is reported afterwards.

A master that comes back takes :class:`MasterStarted` in first, adopts what :func:`~.starting.processes` says is up,
ends every other process of the run, and then has :func:`outstanding` carried out.
"""

from collections.abc import Callable, Iterable
from typing import Any

from dlrover.python.rl.control import lifecycle, losses
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
    Released,
    StandbyLost,
    StandbyReady,
    StepsOpened,
    StopRequested,
    Submitted,
    TrainerFinished,
    TrainerLost,
    TrainerStarted,
    WaitOver,
)
from dlrover.python.rl.control.starting import Result, under_way
from dlrover.python.rl.control.state import JobState, Phase

Handler = Callable[[JobState, Submitted, Any, float], Result]


def step(state: JobState, event: Event, at_s: float) -> Result:
    """Take one event in at ``at_s`` seconds; return the new state and what shall be done.

    A state that comes back as the same object says that the event changed nothing: it need not be written down.
    """
    if state.phase.terminal:
        return state, ()
    if isinstance(event, MasterStarted):
        return lifecycle.master_started(state)
    if state.terms is None:
        return lifecycle.before_submission(state, event)
    if isinstance(event, Placed | Failed | Released) and event.incarnation != state.incarnation:
        return state, ()
    return _HANDLERS[type(event)](state, state.terms, event, at_s)


def replay(events: Iterable[tuple[float, Event]]) -> JobState:
    """The state that a journal's events lead to."""
    state = JobState()
    for at_s, event in events:
        state, _ = step(state, event, at_s)
    return state


def outstanding(state: JobState) -> tuple[Command, ...]:
    """Everything that must be under way in this state: what a master that has just come back carries out."""
    if state.phase is Phase.CREATED and state.incarnation:
        return (Place(state.incarnation, state.excluded),)
    if state.phase is Phase.ENDING:
        return (Release(state.incarnation, final=True),)
    if state.phase is Phase.RESTARTING and not state.released:
        return (Release(state.incarnation, final=False),)
    return () if state.phase.terminal else under_way(state)


_HANDLERS: dict[type, Handler] = {
    Submitted: lifecycle.nothing,
    Placed: lifecycle.placed,
    MemberStarted: lifecycle.member_started,
    MemberLost: losses.member_lost,
    StandbyReady: lifecycle.standby_ready,
    StandbyLost: losses.standby_lost,
    TrainerStarted: lifecycle.trainer_started,
    StepsOpened: lifecycle.steps_opened,
    Progressed: lifecycle.progressed,
    TrainerFinished: lifecycle.trainer_finished,
    TrainerLost: losses.trainer_lost,
    NodeLost: losses.node_lost,
    Failed: losses.failed,
    Released: lifecycle.released,
    WaitOver: lifecycle.wait_over,
    StopRequested: lifecycle.stop_requested,
}
