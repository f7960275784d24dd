# SPDX-License-Identifier: Apache-2.0
"""The status of a job, and log lines about its recoveries."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple, TypeAlias

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import Cause, Event
from dlrover.python.rl.control.state import JobState, Phase, StandbyPhase, processes
from dlrover.python.rl.trainer.step_report import StepReport

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
    incarnation: int  #: 1 at first, one more after each restart
    restarts: int  #: of the whole job
    reason: str  #: why it ended, one line
    cause: Cause | None  #: of its failure
    recoveries: Mapping[str, int] = field(default_factory=dict)  #: "trainer" or a role to its recoveries
    masters: int = 0  #: number of the master's processes so far
    members: tuple[RunningProcess, ...] = ()  #: each process that is up
    last_failure: str = ""  #: the last one that was recovered from, one line
    step: int = 0  #: the last reported step, 0 for none
    total_steps: int = 0  #: 0: unknown
    folder: str = ""  #: of the run's files
    activity: str = ""  #: for people; empty once it has ended
    reward: float = nan  #: of the last step that reported one
    started_s: float = 0.0  #: Unix time, 0: unknown
    step_s: float = 0.0  #: seconds per step, over the last ones; 0: unknown
    roles: Mapping[str, int] = field(default_factory=dict)  #: workers by role
    run: str = ""  #: its id; empty in the answers of masters of earlier versions
    last_step_s: float = 0.0  #: when its last step was reported, Unix time; 0: none yet


Position: TypeAlias = tuple[str, int]
"""The id of a master's process, and the number of reports that were read from it; at first ``("", 0)``."""


@dataclass(frozen=True)
class Update:
    """The status of a job, the step reports since the last position, and the next position."""

    status: JobStatus
    reports: tuple[StepReport, ...]
    position: Position


def devices_of(members: Iterable[RunningProcess]) -> int:
    """Return the number of devices, of which processes may share some."""
    return len({(each.node, device) for each in members for device in each.devices.split(",") if device})


def reward_of(metrics: Mapping[str, float]) -> float:
    """Return the mean reward in the metrics of a step, of a recipe or another trainer; NaN if there is none."""
    return metrics.get("reward/mean", metrics.get("reward", nan))


_ACTIVITIES = {
    Phase.CREATED: "reserving resources",
    Phase.RUNNING: "starting the trainer",
    Phase.RESTARTING: "restarting",
    Phase.ENDING: "ending the processes",
}


def status_of(job: JobSpec, state: JobState, last: StepReport | None, announced: str = "") -> JobStatus:
    """Return the status; ``announced`` is the trainer's own activity."""
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
        last_step_s=last.at_s if last else 0.0,
        folder=str(job.job_dir),
        run=job.run,
        reward=reward_of(last.metrics) if last else nan,
        roles=roles,
        activity=activity,
    )


def line_of(cause: Cause) -> str:
    return f"{cause.who}: {cause.kind.value}: {cause.message}"


def recoveries(before: JobState, after: JobState, event: Event) -> Iterator[str]:
    """Yield log lines about the failure or recovery that an event means."""
    if after is before:
        return
    if isinstance(event, events.MemberLost | events.StandbyLost | events.TrainerLost | events.NodeLost | events.Failed):
        yield line_of(event.cause)
    if isinstance(event, events.MemberStarted) and event.incarnation > 1:
        how = f"standby {event.standby}" if event.standby >= 0 else "a new process"
        yield f"{ProcessId(event.role, event.rank)} is back: attempt {event.incarnation} ({how})"
    if isinstance(event, events.TrainerStarted) and event.epoch > 1:
        yield f"the trainer is back: attempt {event.epoch}"
