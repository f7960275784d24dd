# SPDX-License-Identifier: Apache-2.0
"""Jobs from outside: the operations that the command line needs where jobs run, and the views that it shows.

Jobs are in three places: on a Ray cluster (``RayJobs``), in the folders of runs (``SavedRuns``), in the job service.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any, Protocol

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JournalCorrupt
from dlrover.python.rl.common.names import check_job_name, is_job_name, resume_command
from dlrover.python.rl.common.private_files import open_file, with_real_parent
from dlrover.python.rl.control.events import Failed, MemberLost, NodeLost, StandbyLost, TrainerLost
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.recovery import completed_recoveries
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.master.client.resume import SavedRun, find_saved_run
from dlrover.python.rl.master.process.brain import JOURNAL
from dlrover.python.rl.master.process.status import JobStatus, RunningProcess, line_of, reward_of
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.run.files import LOGS, SUFFIX, LogReader, RunFolder
from dlrover.python.rl.runtime.run.folder import CLUSTER, LAUNCHED, Owner, in_use, newest_owner
from dlrover.python.rl.trainer.trainer import Announcer, Reporter

_TAIL_BYTES = 64 * 1024
_POLL_S = 0.5
_FAILURES = (MemberLost, StandbyLost, TrainerLost, NodeLost, Failed)


@dataclass(frozen=True)
class JobHistory:
    """The history of a job. Times are Unix times in seconds; ``failures`` are lines for people, such as
    ``ROLLOUT[1]: process_died: ...``, each with its time."""

    phase_since_s: float
    failures: tuple[tuple[float, str], ...] = ()  # oldest first
    source: str = ""  # the file with all of them
    log: str = ""  # the file of the process that failed first, empty for none
    state: JobState = JobState()
    began_s: float = 0.0
    last_s: float = 0.0


def log_of(failures: Sequence[tuple[float, str]]) -> str:
    """Return the name of the log of the process that failed first, such as ``rollout-1``."""
    return failures[0][1].partition(":")[0].lower().replace("[", "-").rstrip("]") if failures else ""


def read_history(folder: Path) -> JobHistory | None:
    """Return the history of the run in ``folder``, None if it has no journal. Raises JournalCorrupt, OSError."""
    journal = folder / JOURNAL
    events = decode(read_lines(journal) if journal.exists() else [])
    if not events:
        return None
    state, since_s, failures = JobState(), events[0][0], list[tuple[float, str]]()
    for at_s, event in events:
        before, (state, _) = state, step(state, event, at_s)
        if state.phase is not before.phase:
            since_s = at_s
        if isinstance(event, _FAILURES):
            failures.append((at_s, line_of(event.cause)))
    log = folder / LOGS / f"{log_of(failures)}{SUFFIX}"
    where = str(log) if log.is_file() else ""
    return JobHistory(since_s, tuple(failures), str(journal), where, state, events[0][0], events[-1][0])


@dataclass(frozen=True)
class JobView:
    """A job as it is shown. ``phase`` has the words of the place where it runs; times are in seconds, 0: unknown."""

    name: str
    phase: str
    ended: bool = False
    step: int = 0
    total_steps: int = 0
    reward: float = nan
    step_s: float = 0.0
    started_s: float = 0.0
    elapsed_s: float = 0.0
    restarts: int = 0
    reason: str = ""
    cause: str = ""  # kind of the first cause of a failure
    detail: str = ""  # the evidence
    activity: str = ""
    folder: str = ""
    owner: str = ""
    roles: Mapping[str, int] = field(default_factory=dict)
    recoveries: Mapping[str, int] = field(default_factory=dict)
    members: tuple[RunningProcess, ...] = ()

    @property
    def nodes(self) -> int:
        return len({member.node for member in self.members})

    @property
    def devices(self) -> int:
        """The number of devices, of which processes may share some."""
        return len({(each.node, device) for each in self.members for device in each.devices.split(",") if device})

    @property
    def eta_s(self) -> float:
        left = self.total_steps - self.step
        return 0.0 if self.ended or left <= 0 else left * self.step_s

    def to_plain(self) -> dict[str, Any]:
        plain = {**vars(self), "eta_s": self.eta_s, "nodes": self.nodes, "devices": self.devices}
        plain["members"] = [member._asdict() for member in self.members]
        return {
            name: None if isinstance(value, float) and not isfinite(value) else value for name, value in plain.items()
        }


class JobOperations(Protocol):
    """The operations on jobs. An unknown name raises InvalidJob or UnknownJob with the nearest one."""

    def get(self, name: str) -> JobView: ...

    def history(self, view: JobView) -> JobHistory | None:
        """Return the history of a job; None if it is not readable from here."""

    def logs(self, name: str, process: str, follow: bool, tail: int) -> Iterator[tuple[str, str]]:
        """Yield processes with whole lines that they wrote; for "" of all processes."""

    def list_jobs(self) -> tuple[list[JobView], int]:
        """Return all running jobs and the newest ended ones, and the number of older ones that are left out."""

    def attach(self, name: str, report: Reporter, announce: Announcer) -> JobView:
        """Pass on steps and activities until the job has ended; return its last view."""

    def wait(self, name: str, timeout_s: float | None) -> JobView:
        """Wait until the job has ended, or for ``timeout_s``; return its view."""

    def stop(self, name: str, hard: bool) -> JobView:
        """Stop a job and wait for its end."""

    def resize(self, name: str, role: str, num: int) -> JobView: ...


SHARED_FIELDS = ("name", "step", "total_steps", "step_s", "started_s", "restarts", "reason", "activity", "folder")
"""Fields that a view shares with a job's status and with a service's message of a job."""


def view_of_status(status: JobStatus) -> JobView:
    cause = status.cause
    return JobView(
        phase=status.phase.value,
        ended=status.phase.terminal,
        elapsed_s=time.time() - status.started_s if status.started_s else 0.0,
        cause=cause.kind.value if cause else "",
        detail=cause.detail if cause else "",
        **{name: getattr(status, name) for name in (*SHARED_FIELDS, "reward", "roles", "recoveries", "members")},
    )


def view_of_folder(name: str, folder: Path, history: JobHistory, address: str = "") -> JobView:
    """Return the view of a run from its files; the cluster at ``address``, if any, does not know it."""
    state, last = history.state, _last_metrics(folder)
    over = state.phase.terminal
    holder = None if over else holder_of(folder, address)
    reason = f"its master is gone; to resume the run: {resume_command(folder)}"
    if holder is not None:
        alive = "" if holder.pid and holder.is_here else f", alive within the last {holder.lease_s:.0f} s"
        reason = f"it runs elsewhere: {holder}{alive}"
    settings = state.settings
    return JobView(
        name=name,
        phase=state.phase.value if over else "running" if holder else "lost",
        ended=holder is None,
        step=int(last.get("step", 0)),
        reward=float(reward_of(last)),
        started_s=history.began_s,
        elapsed_s=history.last_s - history.began_s,
        restarts=state.restarts,
        reason=state.reason if over else reason,
        cause=state.failure.kind.value if state.failure else "",
        detail=state.failure.detail if state.failure else "",
        folder=str(folder),
        roles={role: each.num for role, each in settings.roles.items()} if settings else {},
        recoveries=dict(state.recoveries) if over else completed_recoveries(state),
    )


def holder_of(folder: Path, address: str = "") -> Owner | None:
    """Return the live owner of the run in ``folder``, by its process here or a sign of life within its lease; but none
    if its master was on the cluster at ``address``, which does not know it."""
    owner = newest_owner(folder) if in_use(folder) else None
    is_gone = owner is not None and not owner.pid and address and address_in(folder) == address
    return None if is_gone else owner


def address_in(folder: Path) -> str:
    """Return the address of the cluster of the run in ``folder``; empty if unknown."""
    with suppress(OSError), open_file(folder / CLUSTER) as file:
        return file.read().decode()
    return ""


def _last_metrics(folder: Path) -> dict[str, Any]:
    """Return the last whole line of ``metrics.jsonl``; empty if there is none."""
    with suppress(OSError, ValueError), open_file(folder / "metrics.jsonl") as file:
        file.seek(max(file.seek(0, 2) - _TAIL_BYTES, 0))
        lines = file.read().rpartition(b"\n")[0].splitlines()
        last = json.loads(lines[-1]) if lines else {}
        return last if isinstance(last, dict) else {}
    return {}


def check_name(name: str) -> str:
    """Return a valid name. Raises InvalidJob."""
    try:
        return check_job_name(name)
    except ValueError as error:
        raise InvalidJob([ConfigError("name", str(error))]) from error


def is_run_folder(name_or_dir: str) -> bool:
    """Return True if the text names a run by its folder: it is no job name, or another job's run is there."""
    owner = newest_owner(Path(name_or_dir))
    return not is_job_name(name_or_dir) or (owner is not None and owner.job != name_or_dir)


def view_of_run(run: SavedRun, address: str = "") -> JobView:
    """Call :func:`view_of_folder`. Raises InvalidJob if there is no journal, or JournalCorrupt."""
    history = read_history(run.folder)
    if history is None:
        why = "a launcher began the run" if run.owner.runtime == LAUNCHED else "the run has not begun"
        raise InvalidJob([ConfigError(str(run.folder), f"has no journal: {why}")])
    return view_of_folder(run.owner.job, run.folder, history, address)


class SavedRuns:
    """Jobs by the files in the folders of their runs; ``name`` is a folder."""

    def get(self, name: str) -> JobView:
        return view_of_run(find_saved_run(name))

    def history(self, view: JobView) -> JobHistory | None:
        with suppress(JournalCorrupt, OSError):
            return read_history(Path(view.folder)) if view.folder else None
        return None

    def logs(self, name: str, process: str, follow: bool, tail: int) -> Iterator[tuple[str, str]]:
        view = self.get(name)
        reader = LogReader(RunFolder(with_real_parent(Path(view.folder))), process, tail)
        while True:
            reader.check(view.roles if follow and not view.ended else None)
            yield from reader.read()
            if view.ended or not follow:
                return
            time.sleep(_POLL_S)
            view = self.get(name)
