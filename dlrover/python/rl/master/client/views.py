# SPDX-License-Identifier: Apache-2.0
"""Jobs as people see them, and the operations on them; without the readers of runs, so that commands start quickly."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any, Protocol

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import check_job_name, log_name
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.master.process.status import JobStatus, RunningProcess, devices_of
from dlrover.python.rl.trainer.step_report import Announcer, Reporter

_LATE_STEPS, _LATE_S, _LATE_FIRST_S = 10, 60.0, 900.0  # without a step, a job is taken to stand still


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
    return log_name(failures[0][1].partition(":")[0]) if failures else ""


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
    last_step_s: float = 0.0  # when its last step was reported, Unix time
    restarts: int = 0
    reason: str = ""
    cause: str = ""  # kind of the first cause of a failure
    detail: str = ""  # the evidence
    activity: str = ""
    folder: str = ""
    owner: str = ""
    run: str = ""
    priority: int = 0
    submitted_s: float = 0.0
    roles: Mapping[str, int] = field(default_factory=dict)
    recoveries: Mapping[str, int] = field(default_factory=dict)
    members: tuple[RunningProcess, ...] = ()
    devices: int = 0  # in use

    @property
    def nodes(self) -> int:
        return len({member.node for member in self.members})

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.run}"

    @property
    def step_age_s(self) -> float:
        """Seconds since the last step; 0: none yet, or the job has ended."""
        return 0.0 if self.ended or not self.last_step_s else max(time.time() - self.last_step_s, 0.0)

    @property
    def is_late(self) -> bool:
        """True if its next step is overdue, and it does nothing else, such as an evaluation."""
        limit_s = max(_LATE_STEPS * self.step_s, _LATE_S) if self.last_step_s else _LATE_FIRST_S
        since_s = self.last_step_s or self.started_s
        takes_steps = self.phase == "running" and (not self.activity or self.activity.startswith("step "))
        return takes_steps and since_s > 0.0 and time.time() - since_s > limit_s

    @property
    def eta_s(self) -> float:
        takes_steps = self.phase == "running" and not self.activity and not self.is_late
        return max(self.total_steps - self.step, 0) * self.step_s if takes_steps else 0.0

    def to_plain(self) -> dict[str, Any]:
        plain = {**vars(self), "eta_s": self.eta_s, "nodes": self.nodes, "step_age_s": self.step_age_s}
        plain["members"] = [member._asdict() for member in self.members]
        return {
            name: None if isinstance(value, float) and not isfinite(value) else value for name, value in plain.items()
        }


class RunOperations(Protocol):
    """The operations on jobs and on the runs in folders. An unknown name raises InvalidJob or UnknownJob with the
    nearest one."""

    def get(self, name: str) -> JobView: ...

    def history(self, view: JobView) -> JobHistory | None:
        """Return the history of a job; None if it is not readable from here."""

    def logs(self, name: str, process: str, follow: bool, tail: int) -> Iterator[tuple[str, str]]:
        """Yield processes with whole lines that they wrote; for "" of all processes."""


class JobOperations(RunOperations, Protocol):
    def list_jobs(self) -> tuple[list[JobView], int]:
        """Return all running jobs and the newest ended ones, and the number of older ones that are left out."""

    def attach(self, name: str, report: Reporter, announce: Announcer) -> JobView:
        """Pass on steps and activities until the job has ended; return its last view."""

    def wait(self, name: str, timeout_s: float | None) -> JobView:
        """Wait until the job has ended, or for ``timeout_s``; return its view."""

    def stop(self, name: str, hard: bool) -> JobView:
        """Stop a job and wait for its end."""

    def resize(self, name: str, role: str, num: int) -> JobView: ...


SHARED_FIELDS = (
    "name", "run", "step", "total_steps", "step_s", "last_step_s", "started_s", "restarts", "reason", "activity",
    "folder",
)  # fmt: skip
"""Fields that a view shares with a job's status and with a service's message of a job."""


def view_of_status(status: JobStatus) -> JobView:
    cause = status.cause
    return JobView(
        phase=status.phase.value,
        ended=status.phase.terminal,
        elapsed_s=time.time() - status.started_s if status.started_s else 0.0,
        cause=cause.kind.value if cause else "",
        detail=cause.detail if cause else "",
        devices=devices_of(status.members),
        **{name: getattr(status, name) for name in (*SHARED_FIELDS, "reward", "roles", "recoveries", "members")},
    )


def check_name(name: str) -> str:
    """Return a valid name. Raises InvalidJob."""
    try:
        return check_job_name(name)
    except ValueError as error:
        raise InvalidJob([ConfigError("name", str(error))]) from error
