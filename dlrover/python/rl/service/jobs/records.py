# SPDX-License-Identifier: Apache-2.0
"""A job of the service, its events, and the operations on it: plain values without gRPC, SQLite or Ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import nan

from dlrover.python.rl.master.process.status import RunningProcess


class JobPhase(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"  # decided and saved; the runner may not know the job yet
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        return self in (JobPhase.FINISHED, JobPhase.FAILED, JobPhase.STOPPED)

    @property
    def holds_resources(self) -> bool:
        return self in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING)


@dataclass(frozen=True)
class JobDescription:
    """The submitted job, as the runner starts it; deleted when the job has ended."""

    text: str  # the job file
    overrides: tuple[str, ...] = ()
    folder: str = ""  # absolute: where relative paths and modules are looked up


@dataclass(frozen=True)
class JobRecord:
    name: str
    run: str
    owner: str
    client_token: str
    fingerprint: str = ""  # of the submission: a token stands for one request
    resources: Mapping[str, float] = field(default_factory=dict)  # of all its processes together
    priority: int = 0
    phase: JobPhase = JobPhase.QUEUED
    sequence: int = 0  # number of its first event: the order of submission
    revision: int = 0  # number of its last event
    reason: str = ""
    cause: str = ""
    detail: str = ""
    submitted_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    step: int = 0
    total_steps: int = 0
    reward: float = nan
    restarts: int = 0
    results: str = ""  # the folder of its files, once it runs
    activity: str = ""
    roles: Mapping[str, int] = field(default_factory=dict)
    members: tuple[RunningProcess, ...] = ()  # the running processes
    step_s: float = 0.0
    recoveries: Mapping[str, int] = field(default_factory=dict)  # by role, or "trainer"
    places: Mapping[str, int] = field(default_factory=dict)  # the most workers that a resized role has had
    per_member: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # one worker's resources, by role
    hard: bool = False  # while STOPPING
    folder: str = ""  # of its files, absolute, fixed at submission; empty in records of earlier versions
    work_dir: str = ""  # relative to the service's root: where its modules are; empty in records of earlier versions
    last_step_s: float = 0.0  # when its last step was reported

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.run}"


@dataclass(frozen=True)
class JobEvent:
    """``number`` counts the events of all jobs from 1, without gaps."""

    number: int
    at_s: float
    name: str
    run: str
    kind: str
    message: str = ""
    phase: JobPhase = JobPhase.QUEUED
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SubmitJob:
    job: JobRecord  # without a run; an empty folder stands for a new one in run_folders
    description: JobDescription
    run_folders: str = ""  # absolute


@dataclass(frozen=True)
class StopJob:
    name: str
    run: str  # the one that the caller may stop
    reason: str
    hard: bool = False


@dataclass(frozen=True)
class Schedule:
    """Start the queued jobs that fit."""


@dataclass(frozen=True)
class Observed:
    """A runner's report on one run of a job. A report on another run, or on one that has ended, changes nothing."""

    name: str
    run: str
    phase: JobPhase
    reason: str = ""
    cause: str = ""
    detail: str = ""
    step: int = 0
    total_steps: int = 0
    restarts: int = 0
    results: str = ""
    activity: str = ""
    roles: Mapping[str, int] = field(default_factory=dict)
    members: tuple[RunningProcess, ...] = ()
    step_s: float = 0.0  # 0: unknown
    recoveries: Mapping[str, int] = field(default_factory=dict)
    last_failure: str = ""  # the last one that was recovered from, in one line
    metrics: Mapping[str, float] = field(default_factory=dict)


Operation = SubmitJob | StopJob | Schedule | Observed
