"""What the machine is told, and what it answers.

Events are facts that happened; the journal is the list of them. Commands are what shall be done next; they are never
written down, since replaying the events gives them again. Everything that belongs to one incarnation of the job carries
its number: what an older one still says is ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class CauseKind(StrEnum):
    """Why something failed: a closed list."""

    USER_ERROR = "user_error"
    """The user's code raised. Not retried."""

    START_FAILED = "start_failed"
    """A constructor raised. Not retried."""

    PROCESS_DIED = "process_died"
    """A process is gone."""

    OUT_OF_MEMORY = "out_of_memory"
    """A process was killed because memory ran out."""

    NODE_LOST = "node_lost"
    """The node is gone."""

    NO_RESOURCES = "no_resources"
    """The cluster did not have the resources in time."""

    INTERNAL = "internal"
    """A fault of this system."""


RETRYABLE = frozenset({CauseKind.PROCESS_DIED, CauseKind.OUT_OF_MEMORY, CauseKind.NODE_LOST})


@dataclass(frozen=True)
class Cause:
    """One failure.

    Attributes:
        kind: from the closed list.
        who: ``"trainer"``, ``"ROLLOUT[1]"`` or ``"job"``.
        message: one line.
        detail: the remote traceback or log lines, ``""`` for none.
    """

    kind: CauseKind
    who: str
    message: str
    detail: str = ""

    @property
    def retryable(self) -> bool:
        """Whether a restart may help."""
        return self.kind in RETRYABLE

    @property
    def role(self) -> str:
        """``"ROLLOUT"`` for ``"ROLLOUT[1]"``; ``"trainer"`` and ``"job"`` stay."""
        return self.who.partition("[")[0]


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submitted:
    """A job is to be run."""

    job: str
    roles: Mapping[str, int]
    job_max_restart: int
    trainer_max_restart: int
    workload_max_restart: Mapping[str, int] = field(default_factory=dict)
    backoff_s: float = 1.0


@dataclass(frozen=True)
class Placed:
    """The job's resources are reserved."""

    incarnation: int


@dataclass(frozen=True)
class MemberStarted:
    """A workload's constructor has returned."""

    incarnation: int
    role: str
    rank: int
    node: str = ""
    pid: int = 0


@dataclass(frozen=True)
class TrainerStarted:
    """The trainer is constructed and bound; ``init`` and ``fit`` begin."""

    incarnation: int
    node: str = ""
    pid: int = 0


@dataclass(frozen=True)
class TrainerFinished:
    """``fit`` has returned."""

    incarnation: int


@dataclass(frozen=True)
class Failed:
    """Something of this incarnation failed."""

    incarnation: int
    cause: Cause


@dataclass(frozen=True)
class Released:
    """Nothing of this incarnation is left: no process, no reserved resource."""

    incarnation: int


@dataclass(frozen=True)
class RestartDue:
    """The back-off before the restart that follows ``incarnation`` is over."""

    incarnation: int


@dataclass(frozen=True)
class StopRequested:
    """Somebody wants the job to end."""

    reason: str


Event: TypeAlias = (
    Submitted
    | Placed
    | MemberStarted
    | TrainerStarted
    | TrainerFinished
    | Failed
    | Released
    | RestartDue
    | StopRequested
)

EVENT_TYPES: tuple[type, ...] = (
    Submitted,
    Placed,
    MemberStarted,
    TrainerStarted,
    TrainerFinished,
    Failed,
    Released,
    RestartDue,
    StopRequested,
)

# -- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Reserve the job's resources; answer ``Placed`` or ``Failed``."""

    incarnation: int


@dataclass(frozen=True)
class StartMembers:
    """Start every member; answer one ``MemberStarted`` each, or ``Failed``. Watch them from then on."""

    incarnation: int


@dataclass(frozen=True)
class StartTrainer:
    """Start the trainer and run it; answer ``TrainerStarted``, then ``TrainerFinished`` or ``Failed``."""

    incarnation: int


@dataclass(frozen=True)
class Release:
    """End every process of this incarnation and give its resources back; answer ``Released``."""

    incarnation: int


@dataclass(frozen=True)
class WaitThenRestart:
    """Answer ``RestartDue`` after ``delay_s``."""

    incarnation: int
    delay_s: float


Command: TypeAlias = Place | StartMembers | StartTrainer | Release | WaitThenRestart
