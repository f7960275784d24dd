# SPDX-License-Identifier: Apache-2.0
"""Restart limits, back-offs, and the exclusion of faulty nodes."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from statistics import median

from dlrover.python.rl.control.events import Cause, CauseKind, RecoveryScope, Submitted
from dlrover.python.rl.control.state import JobState, Streak

MAX_BACKOFF_S = 60.0
MAX_DOUBLINGS = 64
KEPT_CAUSES = 100

NODE_FAULTS = frozenset({CauseKind.PROCESS_DIED, CauseKind.OUT_OF_MEMORY, CauseKind.HUNG, CauseKind.DEVICE_FAILED})
"""Causes that may be the node's fault."""

SLOW_WINDOWS, SLOW_FACTOR = 24, 4
"""A node is faulty, too, if it loses this many times the limit within this many windows, and others do not."""


def limit_of(settings: Submitted, subject: str) -> int:
    """Restarts without progress. Members that restart alone fail alone: without a limit of its own their role may
    restart as often as the job for each of them."""
    if subject == "trainer":
        return settings.trainer_max_restart
    role = settings.roles.get(subject)
    if role is None:
        return settings.job_max_restart
    if role.max_restart is not None:
        return role.max_restart
    return settings.job_max_restart * (max(role.num, 1) if role.scope is RecoveryScope.MEMBER else 1)


def charge(
    state: JobState, settings: Submitted, cause: Cause, subjects: Iterable[str], at_s: float
) -> tuple[JobState, str]:
    """Record one restart of each subject; the text names the first limit that forbids it, ``""`` if none does."""
    if cause.kind is CauseKind.PREEMPTED:
        return state, ""
    history = dict(state.history)
    for subject in subjects:
        limit, recent = limit_of(settings, subject), within(history.get(subject, ()), settings.window_s, at_s)
        if len(recent) >= limit:
            return state, f"the limit of {limit} restarts for {subject} is reached"
        history[subject] = (*recent, at_s)
    return replace(state, history=history), ""


def refill(state: JobState, settings: Submitted, at_s: float) -> JobState:
    """After progress: one restart of each subject has helped."""
    recent = {subject: within(times, settings.window_s, at_s) for subject, times in state.history.items()}
    return replace(state, history={subject: times[1:] for subject, times in recent.items() if len(times) > 1})


def within(times: tuple[float, ...], window_s: float, at_s: float) -> tuple[float, ...]:
    if not times or times[0] > at_s - window_s:
        return times
    return tuple(time_s for time_s in times if time_s > at_s - window_s)


def lengthen(state: JobState, settings: Submitted, subject: str, at_s: float) -> JobState:
    """Count one more recovery of ``subject`` without progress; a window without one resets the count."""
    before = state.streaks.get(subject)
    count = 1 if before is None or before.at_s <= at_s - settings.window_s else before.count + 1
    return replace(state, streaks={**state.streaks, subject: Streak(count, at_s)})


def backoff_s(state: JobState, settings: Submitted, subject: str) -> float:
    """Seconds before the recovery of ``subject``: none before the first, then doubling."""
    streak = state.streaks.get(subject)
    if streak is None or streak.count < 2:
        return 0.0
    # Bounded: a float cannot hold 2 to the power of every restart limit.
    return min(settings.backoff_s * 2.0 ** min(streak.count - 2, MAX_DOUBLINGS), MAX_BACKOFF_S)


def note(state: JobState, cause: Cause) -> JobState:
    causes = (*state.causes, cause)
    if len(causes) > KEPT_CAUSES:
        causes = (causes[0], *causes[2:])
    return replace(state, causes=causes, first_cause=state.first_cause or cause)


def exclude(state: JobState, node: str) -> JobState:
    if not node or node in state.excluded:
        return state
    return replace(state, excluded=(*state.excluded, node))


def blame(state: JobState, settings: Submitted, node: str, cause: Cause, at_s: float) -> JobState:
    """Count a process lost on ``node``, and exclude the node after too many, at once or one by one, unless it is the
    only one in use."""
    if not node or cause.kind not in NODE_FAULTS:
        return state
    limit, long_s = settings.node_max_failures, SLOW_WINDOWS * settings.window_s
    losses = {each: within(times, long_s, at_s) for each, times in state.node_losses.items()}
    losses[node] = (*losses.get(node, ()), at_s)[-SLOW_FACTOR * limit :]
    state = replace(state, node_losses={each: times for each, times in losses.items() if times})
    is_fast = len(within(losses[node], settings.window_s, at_s)) >= limit
    if not is_fast and len(losses[node]) < SLOW_FACTOR * limit:
        return state
    in_use = _others_in_use(state, node)
    return exclude(state, node) if in_use and (is_fast or _stands_out(state, node, in_use)) else state


def _stands_out(state: JobState, node: str, in_use: set[str]) -> bool:
    """Return True if a node loses twice as many as usual. Where all lose processes the job is at fault, and where the
    losses move on with its processes it must not run out of nodes."""
    usual = median(len(state.node_losses.get(other, ())) for other in in_use)
    return len(state.node_losses[node]) >= 2 * usual and len(state.excluded) < len(in_use)


def _others_in_use(state: JobState, node: str) -> set[str]:
    members = (member.process for member in state.members.values())
    standbys = (standby.process for pool in state.standbys.values() for standby in pool.values())
    processes = chain(members, standbys, (state.trainer.process,))
    return {process.node for process in processes if process is not None} - {"", node, *state.excluded}
