# SPDX-License-Identifier: Apache-2.0
"""What the journal of a run tells about it, while it runs and afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrover.python.rl.control.events import Cause, Failed, MemberLost, NodeLost, StandbyLost, TrainerLost
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.master.brain import JOURNAL
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines

_FAILURES = (MemberLost, StandbyLost, TrainerLost, NodeLost, Failed)


@dataclass(frozen=True)
class RunHistory:
    """Times are Unix times in seconds."""

    state: JobState
    began_s: float
    phase_since_s: float
    last_s: float
    failures: tuple[tuple[float, Cause], ...]  # with the time of each, the first one first
    roles: Mapping[str, int]


def read_history(folder: Path) -> RunHistory | None:
    """The history of the run in ``folder``, None if it has no journal. Raises JournalCorrupt."""
    journal = folder / JOURNAL
    lines = read_lines(journal) if journal.exists() else []
    events = decode(lines)
    if not events:
        return None
    state, since_s, failures = JobState(), events[0][0], list[tuple[float, Cause]]()
    for at_s, event in events:
        before, (state, _) = state, step(state, event, at_s)
        if state.phase is not before.phase:
            since_s = at_s
        if isinstance(event, _FAILURES):
            failures.append((at_s, event.cause))
    settings = state.settings
    roles = {role: settings.num for role, settings in settings.roles.items()} if settings else {}
    return RunHistory(state, events[0][0], since_s, events[-1][0], tuple(failures), roles)
