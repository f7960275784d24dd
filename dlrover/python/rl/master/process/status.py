# SPDX-License-Identifier: Apache-2.0
"""The status of a job, and its log lines about recoveries."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import (
    Cause,
    Event,
    Failed,
    MemberLost,
    MemberStarted,
    NodeLost,
    StandbyLost,
    TrainerLost,
    TrainerStarted,
)
from dlrover.python.rl.control.state import JobState, Phase, StandbyPhase, processes
from dlrover.python.rl.trainer.trainer import StepReport

INTERRUPTED = "interrupted"
"""``JobStatus.reason`` of a job that Ctrl-C has stopped."""


class RunningProcess(NamedTuple):
    process: str  # "ROLLOUT[1]" or "trainer"
    node: str
    pid: int
    devices: str = ""  # ids of its accelerators on that node, "0,1"


@dataclass(frozen=True)
class JobStatus:
    name: str
    phase: Phase
    incarnation: int  #: 1 for its first run, one more for each restart
    restarts: int  #: of the whole job
    reason: str  #: why it ended, one line
    cause: Cause | None  #: of its failure
    recoveries: Mapping[str, int] = field(default_factory=dict)  #: "trainer" or a role to its recoveries
    masters: int = 0  #: processes that the master has had
    members: tuple[RunningProcess, ...] = ()  #: each process that is up
    last_failure: str = ""  #: the last one that was recovered from, one line
    step: int = 0  #: the last reported step, 0 for none
    total_steps: int = 0  #: 0: unknown
    folder: str = ""  #: of the run's files
    activity: str = ""  #: what it does, for people; empty in the end
    reward: float = nan  #: of the last step that reported one
    started_s: float = 0.0  #: Unix time, 0: unknown
    step_s: float = 0.0  #: seconds a step takes, over the last ones; 0: unknown
    roles: Mapping[str, int] = field(default_factory=dict)  #: workers by role
    run: str = ""  #: its id; empty in the answers of masters of earlier versions


@dataclass(frozen=True)
class Position:
    """The number of reports read from a master's process; a restarted one counts from 0."""

    boot: str = ""
    read: int = 0


@dataclass(frozen=True)
class Update:
    """The status of a job, the step reports since the last position, and the next position."""

    status: JobStatus
    reports: tuple[StepReport, ...]
    position: Position


def reward_of(metrics: Mapping[str, float]) -> float:
    """The mean reward of a step, as the recipes or a trainer of one's own report it; NaN if there is none."""
    return metrics.get("reward/mean", metrics.get("reward", nan))


_ACTIVITIES = {
    Phase.CREATED: "reserving resources",
    Phase.RUNNING: "starting the trainer",
    Phase.RESTARTING: "restarting",
    Phase.ENDING: "ending the processes",
}


def status_of(job: JobSpec, state: JobState, last: StepReport | None, announced: str = "") -> JobStatus:
    """``announced`` is what the trainer says it does."""
    if state.settings is None:
        roles = {str(role): spec.num for role, spec in job.workloads.items()}
    else:
        roles = {role: settings.num for role, settings in state.settings.roles.items()}
    activity = _ACTIVITIES.get(state.phase, "")
    if state.phase is Phase.PLACED:
        ready = len(processes(state))
        activity = f"starting {sum(roles.values())} processes" + (f", {ready} are up" if ready else "")
    elif state.phase is Phase.RUNNING:
        activity = announced or ("" if last else activity)
    taking = {
        ProcessId.standby(role, number)
        for role, standbys in state.standbys.items()
        for number, standby in standbys.items()
        if standby.phase is StandbyPhase.TAKING
    }
    return JobStatus(
        name=job.name,
        phase=state.phase,
        incarnation=state.incarnation,
        restarts=state.restarts,
        reason=state.reason,
        cause=state.failure,
        members=tuple(
            RunningProcess(str(process_id), process.host, process.pid, process.devices)
            for process_id, process in processes(state).items()
            if process_id not in taking
        ),
        recoveries=dict(state.recoveries),
        last_failure=line_of(state.causes[-1]) if state.causes else "",
        masters=state.master_starts,
        step=last.step if last else state.committed,
        total_steps=last.total_steps if last else 0,
        folder=str(job.job_dir),
        run=job.run,
        reward=reward_of(last.metrics) if last else nan,
        roles=roles,
        activity=activity,
    )


def line_of(cause: Cause) -> str:
    return f"{cause.who}: {cause.kind.value}: {cause.message}"


def recoveries(before: JobState, after: JobState, event: Event) -> Iterator[str]:
    """Log lines about failures and recoveries in a step of the brain."""
    if after is before:
        return
    if isinstance(event, MemberLost | StandbyLost | TrainerLost | NodeLost | Failed):
        yield line_of(event.cause)
    if isinstance(event, MemberStarted) and event.incarnation > 1:
        how = f"standby {event.standby}" if event.standby >= 0 else "a new process"
        yield f"{ProcessId(event.role, event.rank)} is back as incarnation {event.incarnation} ({how})"
    if isinstance(event, TrainerStarted) and event.epoch > 1:
        yield f"the trainer is back as epoch {event.epoch}"
