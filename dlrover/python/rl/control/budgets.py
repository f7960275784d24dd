"""How often something may be recovered, how long to wait before it, and which nodes are trusted."""

from collections.abc import Iterable
from dataclasses import replace

from dlrover.python.rl.control.events import Cause, CauseKind, Submitted
from dlrover.python.rl.control.state import JobState, Streak

MAX_BACKOFF_S = 60.0
MAX_DOUBLINGS = 64
KEPT_CAUSES = 100

NODE_FAULTS = frozenset({CauseKind.PROCESS_DIED, CauseKind.OUT_OF_MEMORY, CauseKind.HUNG})
"""What may be the node's own fault."""


def limit_of(terms: Submitted, subject: str) -> int:
    """How many restarts of ``subject`` (``"job"``, ``"trainer"``, a role) the window may hold."""
    if subject == "trainer":
        return terms.trainer_max_restart
    limit = terms.roles[subject].max_restart if subject in terms.roles else None
    return terms.job_max_restart if limit is None else limit


def charge(state: JobState, terms: Submitted, subjects: Iterable[str], at_s: float) -> tuple[JobState, str]:
    """Note one restart of each of ``subjects``; the text is the first limit that does not allow it, ``""`` for none."""
    history = dict(state.history)
    for subject in subjects:
        limit, recent = limit_of(terms, subject), within(history.get(subject, ()), terms.window_s, at_s)
        if len(recent) >= limit:
            return state, f"the limit of {limit} restarts for {subject} is reached"
        history[subject] = (*recent, at_s)
    return replace(state, history=history), ""


def within(times: tuple[float, ...], window_s: float, at_s: float) -> tuple[float, ...]:
    """Those of ``times`` that the window still holds."""
    if not times or times[0] > at_s - window_s:
        return times
    return tuple(time_s for time_s in times if time_s > at_s - window_s)


def lengthen(state: JobState, terms: Submitted, subject: str, at_s: float) -> JobState:
    """Count one more recovery of ``subject`` without progress; after a quiet window counting begins anew."""
    before = state.streaks.get(subject)
    count = 1 if before is None or before.at_s <= at_s - terms.window_s else before.count + 1
    return replace(state, streaks={**state.streaks, subject: Streak(count, at_s)})


def backoff_s(state: JobState, terms: Submitted, subject: str) -> float:
    """How long the recovery of ``subject`` waits: the first not at all, the later ones longer and longer."""
    streak = state.streaks.get(subject)
    if streak is None or streak.count < 2:
        return 0.0
    # Bounded: a float cannot hold 2 to the power of every restart limit.
    return min(terms.backoff_s * 2.0 ** min(streak.count - 2, MAX_DOUBLINGS), MAX_BACKOFF_S)


def note(state: JobState, cause: Cause) -> JobState:
    """Remember why a recovery was needed."""
    causes = (*state.causes, cause)
    if len(causes) > KEPT_CAUSES:
        causes = (causes[0], *causes[2:])
    return replace(state, causes=causes, first_cause=state.first_cause or cause)


def exclude(state: JobState, node: str) -> JobState:
    """Never use ``node`` again."""
    if not node or node in state.excluded:
        return state
    return replace(state, excluded=(*state.excluded, node))


def blame(state: JobState, terms: Submitted, node: str, cause: Cause, at_s: float) -> JobState:
    """Count a process lost on ``node``; one that lost too many is excluded, unless it is the only one in use."""
    if not node or cause.kind not in NODE_FAULTS:
        return state
    times = (*within(state.node_losses.get(node, ()), terms.window_s, at_s), at_s)
    state = replace(state, node_losses={**state.node_losses, node: times})
    if len(times) < terms.node_max_failures or not _others_in_use(state, node):
        return state
    return exclude(state, node)


def _others_in_use(state: JobState, node: str) -> bool:
    members = (member.process for member in state.members.values())
    standbys = (standby.process for pool in state.standbys.values() for standby in pool.values())
    unusable = {"", node, *state.excluded}
    return any(
        process is not None and process.node not in unusable
        for processes in (members, standbys, (state.trainer.process,))
        for process in processes
    )
