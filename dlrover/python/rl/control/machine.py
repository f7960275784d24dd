# SPDX-License-Identifier: Apache-2.0
"""The brain: ``step(state, event, at_s) -> (state, commands)``. Pure, total and deterministic.

An event of another incarnation or epoch than the current one, or one that the phase does not expect, returns the same
state object: one death leads to exactly one recovery, however often it is reported.

A master that restarts handles :class:`MasterStarted`, adopts the processes that are up, ends every other process of the
run, and then carries out the :func:`outstanding` commands.
"""

from collections.abc import Callable, Iterable
from typing import Any

from dlrover.python.rl.control import lifecycle, recovery
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
from dlrover.python.rl.control.launch import Result, under_way
from dlrover.python.rl.control.state import JobState, Phase

Handler = Callable[[JobState, Submitted, Any, float], Result]


def step(state: JobState, event: Event, at_s: float) -> Result:
    """Handle one event at ``at_s`` seconds; return the new state and commands.

    The same state object means that the event changed nothing and need not be journalled.
    """
    if state.phase.terminal:
        return state, ()
    if isinstance(event, MasterStarted):
        return lifecycle.master_started(state)
    if state.settings is None:
        return lifecycle.before_submission(state, event)
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


_HANDLERS: dict[type, Handler] = {
    Submitted: lifecycle.ignore,
    Placed: lifecycle.placed,
    MemberStarted: lifecycle.member_started,
    MemberLost: recovery.member_lost,
    StandbyReady: lifecycle.standby_ready,
    StandbyLost: recovery.standby_lost,
    TrainerStarted: lifecycle.trainer_started,
    StepsOpened: lifecycle.steps_opened,
    Progressed: lifecycle.progressed,
    TrainerFinished: lifecycle.trainer_finished,
    TrainerLost: recovery.trainer_lost,
    NodeLost: recovery.node_lost,
    Failed: recovery.failed,
    Released: lifecycle.released,
    WaitOver: lifecycle.wait_over,
    StopRequested: lifecycle.stop_requested,
}
