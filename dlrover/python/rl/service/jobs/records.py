# SPDX-License-Identifier: Apache-2.0
"""A job of the service, its events, and what can be asked of it: plain values without gRPC, SQLite or Ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import nan

from dlrover.python.rl.master.process.status import RunningProcess


class JobPhase(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"  # its start was decided, and is repeated until the runner knows the job
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
    """What was submitted, as the runner starts it; kept until the job has ended."""

    text: str  # the job file
    overrides: tuple[str, ...] = ()
    folder: str = ""  # absolute: where relative paths and modules are looked up


@dataclass(frozen=True)
class JobRecord:
    name: str
    run: str
    owner: str
    client_token: str
    fingerprint: str = ""  # of the request that submitted it
    resources: Mapping[str, float] = field(default_factory=dict)  # that all of the job needs at once
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
    results: str = ""  # folder of its files, once it runs
    activity: str = ""
    roles: Mapping[str, int] = field(default_factory=dict)
    members: tuple[RunningProcess, ...] = ()  # each process that is up
    step_s: float = 0.0
    recoveries: Mapping[str, int] = field(default_factory=dict)  # "trainer" or a role to its recoveries
    places: Mapping[str, int] = field(default_factory=dict)  # that resized roles hold: the most they have had
    per_member: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # role to one worker's resources
    hard: bool = False  # while STOPPING
    folder: str = ""  # where its files go, fixed when it was submitted; empty in records of earlier versions


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


# -- operations: each is decided by the ledger ------------------------------------------------------------------------


@dataclass(frozen=True)
class SubmitJob:
    name: str
    owner: str
    client_token: str
    description: JobDescription
    fingerprint: str  # of the request as it was sent: a token stands for one request
    resources: Mapping[str, float] = field(default_factory=dict)
    roles: Mapping[str, int] = field(default_factory=dict)
    per_member: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # role to one worker's resources
    priority: int = 0
    job_dir: str = ""  # absolute, as the job file says; empty: a new folder
    run_folders: str = ""  # absolute: that such a folder is made in


@dataclass(frozen=True)
class StopJob:
    name: str
    run: str  # that the caller may stop: another one of the name stays as it is
    reason: str
    hard: bool = False


@dataclass(frozen=True)
class Schedule:
    """Start what fits."""


@dataclass(frozen=True)
class Observed:
    """What the runner reports of one run of a job. Reports of another run, or after its end, change nothing."""

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
    last_failure: str = ""  # that was recovered from, one line
    metrics: Mapping[str, float] = field(default_factory=dict)


Operation = SubmitJob | StopJob | Schedule | Observed
