"""What the machine knows of a job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dlrover.python.rl.control.events import Cause, Submitted


class Phase(StrEnum):
    """Where a job is.

    ::

        CREATED -> PLACED -> RUNNING -> ENDING -> FINISHED
           ^         |          |         |----> FAILED
           |         v          v         '----> STOPPED
           '------ RESTARTING <-'
    """

    CREATED = "created"
    """Known; resources are being reserved."""

    PLACED = "placed"
    """Resources reserved; members and trainer are being started."""

    RUNNING = "running"
    """The trainer runs."""

    RESTARTING = "restarting"
    """What is left of a failed incarnation is being removed, or the back-off runs."""

    ENDING = "ending"
    """The outcome is decided; processes and resources are being given back."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def terminal(self) -> bool:
        """Whether nothing more will happen."""
        return self in (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True)
class Process:
    """A process that is up: where it runs."""

    node: str
    pid: int


@dataclass(frozen=True)
class JobState:
    """The state of one job; only :func:`~dlrover.python.rl.control.machine.step` makes new ones.

    Attributes:
        phase: where the job is.
        incarnation: 1 for the first run of the job's processes, one more for each restart; 0 before it is submitted.
        terms: what was submitted.
        members: ``"ROLLOUT[1]"`` to its process, for those that are up in this incarnation.
        trainer: its process, None while it is not up.
        released: whether nothing is left of this incarnation: it may be followed by the next one.
        outcome: the terminal phase that ENDING leads to.
        causes: the first cause of each incarnation that failed, oldest first.
        restarts_by: what caused restarts (``"trainer"``, a role), and how many.
        reason: why the job ended, one line.
    """

    phase: Phase = Phase.CREATED
    incarnation: int = 0
    terms: Submitted | None = None
    members: Mapping[str, Process] = field(default_factory=dict)
    trainer: Process | None = None
    released: bool = False
    outcome: Phase | None = None
    causes: tuple[Cause, ...] = ()
    restarts_by: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""

    @property
    def restarts(self) -> int:
        """How often the whole job was restarted."""
        return sum(self.restarts_by.values())

    @property
    def cause(self) -> Cause | None:
        """What ended the job, when it failed: the first cause of its last incarnation."""
        return self.causes[-1] if self.causes and self.outcome is Phase.FAILED else None
