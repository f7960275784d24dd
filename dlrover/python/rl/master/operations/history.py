# SPDX-License-Identifier: Apache-2.0
"""What the journal of a run tells about it, while it runs and afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrover.python.rl.control.events import Cause, Failed, MemberLost, NodeLost, StandbyLost, TrainerLost
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.master.process.brain import JOURNAL
from dlrover.python.rl.master.process.status import line_of
from dlrover.python.rl.runtime.checkpoint.storage.journal_store import read_lines
from dlrover.python.rl.runtime.run.files import LOGS, SUFFIX

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


@dataclass(frozen=True)
class JobHistory:
    """What has happened to a job, for people: lines such as ``ROLLOUT[1]: process_died: ...``, each with its time."""

    phase_since_s: float
    failures: tuple[tuple[float, str], ...] = ()  # the first one first
    source: str = ""  # where all of them are
    log: str = ""  # where the process that failed first has written, empty if there is nothing

    @classmethod
    def of_folder(cls, folder: Path) -> "JobHistory | None":
        """None if the run in ``folder`` has no journal. Raises JournalCorrupt, OSError."""
        history = read_history(folder)
        if history is None:
            return None
        failures = tuple((at_s, line_of(cause)) for at_s, cause in history.failures)
        log = folder / LOGS / f"{log_of(failures)}{SUFFIX}"
        return cls(history.phase_since_s, failures, str(folder / JOURNAL), str(log) if log.is_file() else "")


def log_of(failures: Sequence[tuple[float, str]]) -> str:
    """The name of the log of the process that failed first, such as ``rollout-1``."""
    return failures[0][1].partition(":")[0].lower().replace("[", "-").rstrip("]") if failures else ""


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
