"""What a job answers when it is asked how it is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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
from dlrover.python.rl.control.state import JobState, Phase, StandbyPhase
from dlrover.python.rl.trainer.trainer import StepReport


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment.

    Attributes:
        name: the job.
        phase: where it is.
        incarnation: 1 for its first run, one more for each restart.
        restarts: how often the whole job was restarted.
        recoveries: what was recovered while the job went on (``"trainer"``, a role), and how often.
        masters: how many processes the master has had.
        reason: why it ended, one line; ``""`` before.
        cause: what made it fail, or None.
        members: ``("ROLLOUT[1]", node, pid)`` of what is up, the trainer included.
        step: the last step reported, and of how many (0: none, unknown).
        total_steps: see ``step``.
    """

    name: str
    phase: Phase
    incarnation: int
    restarts: int
    reason: str
    cause: Cause | None
    recoveries: Mapping[str, int] = field(default_factory=dict)
    masters: int = 0
    members: tuple[tuple[str, str, int], ...] = ()
    step: int = 0
    total_steps: int = 0


@dataclass(frozen=True)
class Position:
    """How far somebody has read a master's reports; one that has restarted counts them anew."""

    boot: str = ""
    read: int = 0

    def since(self, boot: str) -> int:
        """From where to read on in the reports of the master's process ``boot``."""
        return self.read if boot == self.boot else 0


@dataclass(frozen=True)
class Update:
    """News of a job: its status, the step reports since the asker's last look, and where to look on from."""

    status: JobStatus
    reports: tuple[StepReport, ...]
    position: Position


def status_of(name: str, state: JobState, last: StepReport | None) -> JobStatus:
    """The status that a state amounts to."""
    up = [(who, member.process) for who, member in state.members.items()]
    up.append(("trainer", state.trainer.process))
    for role, standbys in state.standbys.items():
        ready = {number: standby for number, standby in standbys.items() if standby.phase is not StandbyPhase.TAKING}
        up += [(f"{role}-standby[{number}]", standby.process) for number, standby in ready.items()]
    return JobStatus(
        name=name,
        phase=state.phase,
        incarnation=state.incarnation,
        restarts=state.restarts,
        reason=state.reason,
        cause=state.cause,
        members=tuple((who, process.host, process.pid) for who, process in up if process is not None),
        recoveries=dict(state.recoveries),
        masters=state.master_starts,
        step=last.step if last else 0,
        total_steps=last.total_steps if last else 0,
    )


def recoveries(before: JobState, after: JobState, event: Event) -> Iterator[str]:
    """What a step of the brain says of losses and recoveries, for the log."""
    if after is before:
        return
    if isinstance(event, MemberLost | StandbyLost | TrainerLost | NodeLost | Failed):
        yield f"{event.cause.who}: {event.cause.kind.value}: {event.cause.message}"
    if isinstance(event, MemberStarted) and event.incarnation > 1:
        how = f"standby {event.standby}" if event.standby >= 0 else "a new process"
        yield f"{event.role}[{event.rank}] is back as incarnation {event.incarnation} ({how})"
    if isinstance(event, TrainerStarted) and event.epoch > 1:
        yield f"the trainer is back as epoch {event.epoch}"
