"""What a job answers when it is asked how it is."""

from dataclasses import dataclass

from dlrover.python.rl.control.events import Cause
from dlrover.python.rl.control.state import JobState, Phase
from dlrover.python.rl.trainer.trainer import StepReport


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment.

    Attributes:
        name: the job.
        phase: where it is.
        incarnation: 1 for its first run, one more for each restart.
        restarts: how often it was restarted.
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
    members: tuple[tuple[str, str, int], ...] = ()
    step: int = 0
    total_steps: int = 0


@dataclass(frozen=True)
class Update:
    """News of a job: its status, the step reports since the asker's last look, and where to look on from."""

    status: JobStatus
    reports: tuple[StepReport, ...]
    position: int


def status_of(name: str, state: JobState, last: StepReport | None) -> JobStatus:
    """The status that a state amounts to."""
    up = [(who, process.node, process.pid) for who, process in state.members.items()]
    if state.trainer is not None:
        up.append(("trainer", state.trainer.node, state.trainer.pid))
    return JobStatus(
        name=name,
        phase=state.phase,
        incarnation=state.incarnation,
        restarts=state.restarts,
        reason=state.reason,
        cause=state.cause,
        members=tuple(up),
        step=last.step if last else 0,
        total_steps=last.total_steps if last else 0,
    )
