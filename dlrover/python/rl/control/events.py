"""What the machine is told.

Events are facts that happened; the journal is the list of them, each with the time it was taken in. Commands
(``commands.py``) are what shall be done next; they are never written down, since the state gives them again
(:func:`~dlrover.python.rl.control.machine.outstanding`).

Three numbers keep the living apart from the dead. The job's *incarnation* rises when everything restarts. A member's
*incarnation* rises with every process that takes its place, over the whole life of the job. The trainer's *epoch* rises
with every process that runs the trainer. What an older number still says is ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class CauseKind(StrEnum):
    """Why something failed: a closed list."""

    USER_ERROR = "user_error"
    """The user's code raised. Not retried."""

    RETRYABLE_ERROR = "retryable_error"
    """The user's code raised, and the exception says that trying again may help."""

    START_FAILED = "start_failed"
    """A constructor raised. Not retried."""

    PROCESS_DIED = "process_died"
    """A process is gone."""

    OUT_OF_MEMORY = "out_of_memory"
    """A process was killed because memory ran out."""

    NODE_LOST = "node_lost"
    """The node is gone."""

    HUNG = "hung"
    """No progress within the role's limit; the process was killed."""

    PREEMPTED = "preempted"
    """It was ended because others of its group had to restart. Never charged to a budget."""

    NO_RESOURCES = "no_resources"
    """The cluster did not have the resources in time."""

    INTERNAL = "internal"
    """A fault of this system."""


RETRYABLE = frozenset(
    {
        CauseKind.RETRYABLE_ERROR,
        CauseKind.PROCESS_DIED,
        CauseKind.OUT_OF_MEMORY,
        CauseKind.NODE_LOST,
        CauseKind.HUNG,
        CauseKind.PREEMPTED,
    }
)

MOST_DETAIL = 1 << 16
"""Characters that the journal keeps of one cause's detail."""

_CUT = "\n[...]\n"


@dataclass(frozen=True)
class Cause:
    """One failure.

    Attributes:
        kind: from the closed list.
        who: ``"trainer"``, ``"ROLLOUT[1]"`` or ``"job"``.
        message: one line.
        detail: the remote traceback, stacks or log lines, ``""`` for none; of a long text its beginning and its end.
    """

    kind: CauseKind
    who: str
    message: str
    detail: str = ""

    def __post_init__(self) -> None:
        if len(self.detail) > MOST_DETAIL:
            half = MOST_DETAIL // 2 - len(_CUT)
            object.__setattr__(self, "detail", self.detail[:half] + _CUT + self.detail[-half:])

    @property
    def retryable(self) -> bool:
        """Whether a restart may help."""
        return self.kind in RETRYABLE

    @property
    def role(self) -> str:
        """``"ROLLOUT"`` for ``"ROLLOUT[1]"``; ``"trainer"`` and ``"job"`` stay."""
        return self.who.partition("[")[0]


class RecoveryScope(StrEnum):
    """What restarts when a member of a role is lost."""

    MEMBER = "member"
    """That member alone."""

    GROUP = "group"
    """All members of its role: their ranks meet in collectives."""


@dataclass(frozen=True)
class RoleTerms:
    """How one role runs and recovers.

    Attributes:
        num: its members.
        scope: what restarts when one of them is lost.
        standby: processes kept ready to take a member's place.
        max_restart: recoveries of the role within the job's window; None: the job's limit.
    """

    num: int
    scope: RecoveryScope = RecoveryScope.MEMBER
    standby: int = 0
    max_restart: int | None = None


@dataclass(frozen=True)
class Process:
    """A process that is up.

    Attributes:
        node: id of its node.
        pid: its process id there.
        host: the node's name, for people.
        address: the node's address.
        port: a port that was free there when it started, for a rendezvous; -1 for none.
        slot: which of its role's places it takes: the members' come first, then the standbys'; -1 for none.
    """

    node: str = ""
    pid: int = 0
    host: str = ""
    address: str = ""
    port: int = -1
    slot: int = -1


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submitted:
    """A job is to be run.

    Attributes:
        job: its name.
        run: tells this run apart from every other run of the same name; part of every actor's name.
        roles: role to its terms.
        job_max_restart: restarts of the whole job within the window.
        trainer_max_restart: restarts of the trainer within the window.
        backoff_s: wait before the second restart of the same thing without progress in between, doubled at each further
            one.
        window_s: restarts older than this no longer count.
        node_max_failures: processes of the job that a node may lose within the window before it is excluded; a lost
            node is excluded at once.
    """

    job: str
    roles: Mapping[str, RoleTerms]
    run: str = "0"
    job_max_restart: int = 10
    trainer_max_restart: int = 10
    backoff_s: float = 1.0
    window_s: float = 3600.0
    node_max_failures: int = 3


@dataclass(frozen=True)
class MasterStarted:
    """The master's process is up, for the first time or again: ``pid`` on ``node``."""

    node: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Placed:
    """The job's resources are reserved."""

    incarnation: int


@dataclass(frozen=True)
class MemberStarted:
    """A workload's constructor has returned. ``standby`` is the number of the standby that it was, -1 for none."""

    role: str
    rank: int
    incarnation: int
    process: Process = field(default_factory=Process)
    standby: int = -1


@dataclass(frozen=True)
class MemberLost:
    """A member's process is gone, or was found hung and killed. ``node`` is where it was, ``""`` when nobody knows."""

    role: str
    rank: int
    incarnation: int
    cause: Cause
    node: str = ""


@dataclass(frozen=True)
class StandbyReady:
    """Standby number ``number`` of a role is up and has imported what it will need."""

    role: str
    number: int
    process: Process = field(default_factory=Process)


@dataclass(frozen=True)
class StandbyLost:
    """A standby is gone before it was needed, or while it was taking over; ``node`` is where it was."""

    role: str
    number: int
    cause: Cause
    node: str = ""


@dataclass(frozen=True)
class TrainerStarted:
    """The trainer's process is up and begins."""

    epoch: int
    process: Process = field(default_factory=Process)


@dataclass(frozen=True)
class StepsOpened:
    """The trainer has entered ``steps()``: from here on losses are recovered by scope, not by a restart of all."""

    epoch: int


@dataclass(frozen=True)
class Progressed:
    """The trainer has committed ``step``. Told once after each recovery, not for each step."""

    epoch: int
    step: int


@dataclass(frozen=True)
class TrainerFinished:
    """``fit`` has returned."""

    epoch: int


@dataclass(frozen=True)
class TrainerLost:
    """The trainer's process is gone, was found hung and killed, or ``fit`` raised: the cause says which. It was on
    ``node``."""

    epoch: int
    cause: Cause
    node: str = ""


@dataclass(frozen=True)
class NodeLost:
    """A node is gone, with everything of the job that ran on it."""

    node: str
    cause: Cause


@dataclass(frozen=True)
class Failed:
    """Something failed that no member or trainer stands for: placing, or the system itself."""

    incarnation: int
    cause: Cause


@dataclass(frozen=True)
class Released:
    """Nothing of this incarnation of the job is left: no process, no reserved resource."""

    incarnation: int


@dataclass(frozen=True)
class WaitOver:
    """The back-off of a :class:`Wait` is over."""

    timer: str


@dataclass(frozen=True)
class StopRequested:
    """Somebody wants the job to end."""

    reason: str


Event: TypeAlias = (
    Submitted
    | MasterStarted
    | Placed
    | MemberStarted
    | MemberLost
    | StandbyReady
    | StandbyLost
    | TrainerStarted
    | StepsOpened
    | Progressed
    | TrainerFinished
    | TrainerLost
    | NodeLost
    | Failed
    | Released
    | WaitOver
    | StopRequested
)

EVENT_TYPES: tuple[type, ...] = (
    Submitted,
    MasterStarted,
    Placed,
    MemberStarted,
    MemberLost,
    StandbyReady,
    StandbyLost,
    TrainerStarted,
    StepsOpened,
    Progressed,
    TrainerFinished,
    TrainerLost,
    NodeLost,
    Failed,
    Released,
    WaitOver,
    StopRequested,
)
