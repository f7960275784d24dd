"""What the machine knows of a job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dlrover.python.rl.control.events import Cause, Process, Submitted


class Phase(StrEnum):
    """Where a job is. Members, standbys and the trainer are recovered one by one inside RUNNING.

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
    """The trainer runs, or is being recovered."""

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

    @property
    def live(self) -> bool:
        """Whether members and the trainer may have processes that count."""
        return self in (Phase.PLACED, Phase.RUNNING)


class MemberPhase(StrEnum):
    """Where a member or the trainer is."""

    WAITING = "waiting"
    """It has no process: its turn has not come, or a back-off runs."""

    STARTING = "starting"
    UP = "up"


class StandbyPhase(StrEnum):
    """Where a standby is."""

    WAITING = "waiting"
    """It has no process: a back-off runs."""

    STARTING = "starting"
    READY = "ready"

    TAKING = "taking"
    """It is becoming a member."""


class EndReason(StrEnum):
    """Why a job ended: a closed list."""

    FINISHED = "finished"
    """The trainer returned."""

    STOPPED = "stopped"
    """Somebody wanted it."""

    NOT_RETRYABLE = "not_retryable"
    """A failure that a restart does not help."""

    RESTART_LIMIT = "restart_limit"
    """More restarts within the window than allowed."""


@dataclass(frozen=True)
class Member:
    """One member.

    Attributes:
        incarnation: of the process it has, or will have next.
        phase: where it is.
        process: its process, None while it is not up.
        standby: the standby that it is or was, -1 for none.
    """

    incarnation: int
    phase: MemberPhase = MemberPhase.WAITING
    process: Process | None = None
    standby: int = -1


@dataclass(frozen=True)
class Standby:
    """One standby: where it is, and its process once it is ready."""

    phase: StandbyPhase
    process: Process | None = None


@dataclass(frozen=True)
class Trainer:
    """The trainer.

    Attributes:
        phase: where it is.
        process: its process, None while it is not up.
        fresh: whether the members are as new to it.
        reason: why it restarts, ``""`` the first time.
    """

    phase: MemberPhase = MemberPhase.WAITING
    process: Process | None = None
    fresh: bool = True
    reason: str = ""


@dataclass(frozen=True)
class Streak:
    """Recoveries of one thing without progress in between: how many, and when the last one was, in seconds."""

    count: int
    at_s: float


@dataclass(frozen=True)
class JobState:
    """The state of one job; only :func:`~dlrover.python.rl.control.machine.step` makes new ones.

    Attributes:
        phase: where the job is.
        incarnation: 1 for the first run of the job's processes, one more for each restart; 0 before it is submitted.
        epoch: of the trainer's process, or of the next one; 0 before the job is submitted.
        terms: what was submitted.
        members: ``"ROLLOUT[1]"`` to where it is.
        standbys: role to number to where it is.
        next_standby: role to the number of its next standby.
        trainer: where the trainer is.
        opened: whether the trainer has entered ``steps()`` in this incarnation of the job.
        released: whether nothing is left of this incarnation: it may be followed by the next one.
        waits: back-offs that run: timer to seconds.
        excluded: nodes that are not used any more, in the order they were found bad.
        node_losses: node to the times of processes lost there, in seconds.
        causes: the causes of the recoveries, oldest first: the very first and the newest ones.
        first_cause: the first cause since the last progress.
        history: ``"job"``, ``"trainer"`` or a role to the times of its restarts within the window, in seconds.
        streaks: ``"job"``, ``"trainer"``, ``"ROLLOUT[1]"``, ``"ACTOR"`` to its recoveries without progress.
        recoveries: ``"trainer"`` or a role to how often it was recovered while the job went on.
        restarts_by: what caused restarts of the whole job (``"trainer"``, ``"job"``, a role), and how many.
        committed: the last step that the trainer told to be committed.
        master_starts: processes the master has had.
        outcome: the terminal phase that ENDING leads to.
        ended_by: why, for machines.
        reason: why, one line for people.
        failure: what ended the job when it failed.
    """

    phase: Phase = Phase.CREATED
    incarnation: int = 0
    epoch: int = 0
    terms: Submitted | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    standbys: Mapping[str, Mapping[int, Standby]] = field(default_factory=dict)
    next_standby: Mapping[str, int] = field(default_factory=dict)
    trainer: Trainer = field(default_factory=Trainer)
    opened: bool = False
    released: bool = False
    waits: Mapping[str, float] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    node_losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    causes: tuple[Cause, ...] = ()
    first_cause: Cause | None = None
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    streaks: Mapping[str, Streak] = field(default_factory=dict)
    recoveries: Mapping[str, int] = field(default_factory=dict)
    restarts_by: Mapping[str, int] = field(default_factory=dict)
    committed: int = 0
    master_starts: int = 0
    outcome: Phase | None = None
    ended_by: EndReason | None = None
    reason: str = ""
    failure: Cause | None = None

    @property
    def restarts(self) -> int:
        """How often the whole job was restarted."""
        return sum(self.restarts_by.values())

    @property
    def cause(self) -> Cause | None:
        """What ended the job, when it failed: the first cause since the last progress."""
        return self.failure


def member_key(role: str, rank: int) -> str:
    """``"ROLLOUT[1]"``."""
    return f"{role}[{rank}]"


def ranks_of(state: JobState, role: str) -> range:
    """All ranks of a role."""
    return range(state.terms.roles[role].num) if state.terms is not None else range(0)
