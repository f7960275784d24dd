# SPDX-License-Identifier: Apache-2.0
"""The machine's input: facts, which the journal lists. Commands are not journalled, since the state yields them again.

Three numbers tell a process from its predecessors: the job's *incarnation* rises when everything restarts, a worker's
*incarnation* with each of its processes over the whole job, the trainer's *epoch* with each of its processes. Events of
an older number are ignored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias, get_args

from dlrover.python.rl.common.errors import DLRoverRLError
from dlrover.python.rl.common.log import cut_middle, redacted, valid_text
from dlrover.python.rl.common.names import ProcessId, ProcessKind


class CauseKind(StrEnum):
    USER_ERROR = "user_error"  # the user's code raised; not retried
    UNKNOWN_ERROR = "unknown_error"  # an exception that may be the machine's: tried once more in fresh processes
    DEVICE_FAILED = "device_failed"  # a GPU or its driver; its process is replaced
    LINK_FAILED = "link_failed"  # a collective or rendezvous; its process is replaced
    RETRYABLE_ERROR = "retryable_error"  # the user's code raised an error that says that a retry may help
    START_FAILED = "start_failed"  # a constructor raised; not retried
    PROCESS_DIED = "process_died"
    OUT_OF_MEMORY = "out_of_memory"
    NO_SPACE = "no_space"  # a disk stayed full; not retried
    NODE_LOST = "node_lost"
    HUNG = "hung"  # no progress within the role's limit; the process was killed
    PREEMPTED = "preempted"  # its group had to restart, or its node will go; never charged to a budget
    NO_RESOURCES = "no_resources"  # the cluster did not have them in time
    INTERNAL = "internal"  # a fault of this system


RETRYABLE = frozenset(CauseKind) - {
    CauseKind.USER_ERROR,
    CauseKind.UNKNOWN_ERROR,
    CauseKind.START_FAILED,
    CauseKind.NO_SPACE,
    CauseKind.NO_RESOURCES,
    CauseKind.INTERNAL,
}

LEFT_ALIVE = frozenset({CauseKind.UNKNOWN_ERROR, CauseKind.DEVICE_FAILED, CauseKind.LINK_FAILED})
"""Causes that leave a process which must be ended."""

MOST_DETAIL = 1 << 14
"""Characters that the journal keeps of one cause's detail."""

COULD_NOT_START = "could not start: "

_MOST_MESSAGE = 600
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Cause:
    """Why a process or the job failed."""

    kind: CauseKind
    who: str  # "trainer", "ROLLOUT[1]" or "job"
    message: str  # one line
    detail: str = ""  # remote traceback, stacks or log lines; the middle of a long text is cut out

    def __post_init__(self) -> None:
        message, detail = redacted(valid_text(" ".join(self.message.splitlines()))), redacted(valid_text(self.detail))
        object.__setattr__(self, "message", cut_middle(message, _MOST_MESSAGE))
        object.__setattr__(self, "detail", cut_middle(detail, MOST_DETAIL, "\n[...]\n"))

    @property
    def retryable(self) -> bool:
        return self.kind in RETRYABLE

    def is_like(self, other: "Cause") -> bool:
        """The same error of the same role, whatever numbers are in its words."""
        return self.role == other.role and _NUMBER.sub("#", self.message) == _NUMBER.sub("#", other.message)

    def as_users(self) -> "Cause":
        """What an unknown error is when fresh processes have not helped."""
        is_start = self.message.startswith(COULD_NOT_START)
        return replace(self, kind=CauseKind.START_FAILED if is_start else CauseKind.USER_ERROR)

    @property
    def role(self) -> str:
        """``"ROLLOUT"`` for ``"ROLLOUT[1]"``; ``"trainer"`` and ``"job"`` stay."""
        return ProcessId.parse(self.who).role if "[" in self.who else self.who


class RecoveryScope(StrEnum):
    """What restarts when a worker of a role is lost: it alone, or all ranks, which meet in collectives."""

    MEMBER = "member"
    GROUP = "group"


@dataclass(frozen=True)
class RoleSettings:
    """How one role runs and recovers."""

    num: int
    scope: RecoveryScope = RecoveryScope.MEMBER
    standby: int = 0
    max_restart: int | None = None  # within the window; None: the job's limit
    least: int = 0  # with how few workers the job goes on while the others have no place; 0: with all
    rejoins: bool = False  # of GROUP: ranks that are still up keep their processes when another is lost


@dataclass(frozen=True)
class Process:
    node: str = ""  # id of its node
    pid: int = 0
    host: str = ""  # the node's name, for people
    address: str = ""
    port: int = -1  # a TCP port that is kept free for a rendezvous; -1 for none
    slot: int = -1  # of its role: the workers' slots come first, then the standbys'; -1 for none
    devices: str = ""  # ids of its accelerators on that node, "0,1"


@dataclass(frozen=True)
class Submitted:
    """A job is to be run. Limits count restarts within ``window_s``."""

    job: str
    roles: Mapping[str, RoleSettings]
    run: str = "0"  # unique among the runs of this job name; part of every actor's name
    job_max_restart: int = 10
    trainer_max_restart: int = 10
    backoff_s: float = 1.0  # before the second restart without progress in between, doubled at each further one
    window_s: float = 3600.0
    node_max_failures: int = 3  # lost processes before a node is excluded; a lost node is excluded at once
    first: int = 1  # number of the first processes: above those of the run before it lost its cluster


@dataclass(frozen=True)
class MasterStarted:
    """The master's process is up, for the first time or again."""

    node: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Placed:
    """The job's resources are reserved."""

    incarnation: int


@dataclass(frozen=True)
class MemberStarted:
    """A workload's constructor has returned."""

    role: str
    rank: int
    incarnation: int
    process: Process = field(default_factory=Process)
    standby: int = -1  # the standby that it was, -1 for none
    born: int = 0  # the incarnation with which its process began, 0: this one


@dataclass(frozen=True)
class MemberLost:
    """A worker's process is gone, or hung and was killed; ``node`` is ``""`` when unknown."""

    role: str
    rank: int
    incarnation: int
    cause: Cause
    node: str = ""


@dataclass(frozen=True)
class StandbyReady:
    """A standby is up and has imported what it will need."""

    role: str
    number: int
    process: Process = field(default_factory=Process)


@dataclass(frozen=True)
class StandbyLost:
    """A standby is gone, before it was needed or while it was becoming a worker."""

    role: str
    number: int
    cause: Cause
    node: str = ""


@dataclass(frozen=True)
class TrainerStarted:
    epoch: int
    process: Process = field(default_factory=Process)


@dataclass(frozen=True)
class StepsOpened:
    """The trainer has entered ``steps()``: from now on failures are recovered by scope instead of a restart of all."""

    epoch: int


@dataclass(frozen=True)
class Progressed:
    """The trainer has committed ``step``; reported after a recovery, not at each step."""

    epoch: int
    step: int


@dataclass(frozen=True)
class TrainerFinished:
    """``fit`` has returned."""

    epoch: int


@dataclass(frozen=True)
class TrainerLost:
    """The trainer's process is gone, hung and was killed, or ``fit`` raised."""

    epoch: int
    cause: Cause
    node: str = ""


def make_lost_event(
    process_id: ProcessId, number: int, cause: Cause, node: str = ""
) -> MemberLost | StandbyLost | TrainerLost:
    if process_id.kind is ProcessKind.TRAINER:
        return TrainerLost(number, cause, node)
    if process_id.kind is ProcessKind.STANDBY:
        return StandbyLost(process_id.role, process_id.rank, cause, node)
    return MemberLost(process_id.role, process_id.rank, number, cause, node)


@dataclass(frozen=True)
class NodeLost:
    """A node is gone, with everything of the job that ran on it."""

    node: str
    cause: Cause


@dataclass(frozen=True)
class Failed:
    """A failure of no single process: of the placement, or of the system itself."""

    incarnation: int
    cause: Cause


@dataclass(frozen=True)
class Released:
    """This incarnation of the job has no process and no reserved resource any more."""

    incarnation: int


@dataclass(frozen=True)
class WaitOver:
    """The back-off of a :class:`Wait` is over."""

    timer: str


@dataclass(frozen=True)
class Resized:
    """A stateless role is to have ``num`` workers; the places of those that it has not had yet are reserved."""

    role: str
    num: int
    wanted: int = 0  # it grows to so many when they can be placed; 0: it stays as it is


@dataclass(frozen=True)
class Unplaced:
    """There is no place for a worker of a role that may go on with fewer."""

    role: str
    rank: int
    incarnation: int
    cause: Cause


@dataclass(frozen=True)
class StopRequested:
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
    | Resized
    | Unplaced
    | StopRequested
)

EVENT_TYPES: tuple[type, ...] = get_args(Event)


# -- whose fault an exception is --------------------------------------------------------------------------------------

# The words of CUDA's error strings, of NCCL's and Gloo's errors, and of torch's rendezvous. A device, driver or link
# that fails raises an ordinary exception in the process that uses it, and leaves that process unusable.
_DEVICE = re.compile(
    r"uncorrectable (ECC|NVLink)|ECC error|hardware stack error|nvlink or a hardware error|\bXid\b|fallen off the bus"
    r"|unspecified launch failure|driver shutting down|driver.{0,40}version mismatch|system not yet initialized"
    r"|CUDA-capable devices? (are|is) (busy|unavailable|detected)"
    r"|^RuntimeError: device check failed|CUDA error: (unknown error|initialization error|context is destroyed)"
    r"|(cudaError|CUDA_ERROR_?)(ECC|Hardware|Launch_?Fail|Unknown|Device_?s?Unavailable|System_?Not|Nvlink|Contained)",
    re.IGNORECASE,
)
_LINK = re.compile(
    r"\bNCCL (error|communicator was aborted)|nccl(System|Internal|Remote|UnhandledCuda)Error"
    r"|Watchdog caught collective operation timeout|timed out after .* waiting for clients|client socket has timed out"
    r"|\bgloo\b.*(timed out|closed|reset|refused|connectFullMesh failed)|Gloo connectFullMesh failed"
    r"|\b(DistBackend|DistNetwork|DistStore|RendezvousTimeout)Error\b",
    re.IGNORECASE,
)
_BUGS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, NameError, TypeError),
    *(NotImplementedError, SyntaxError, SystemExit, ValueError),
    *(FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError),
)


def fault_of(error: BaseException) -> CauseKind:
    """Return whose fault an exception is, as far as its type and words tell: DEVICE_FAILED, LINK_FAILED, USER_ERROR or
    UNKNOWN_ERROR. A ``RuntimeError`` of other words is unknown, as is every exception that a library defines."""
    fault = fault_in(f"{type(error).__name__}: {error}")
    if fault is not CauseKind.UNKNOWN_ERROR and not isinstance(error, _BUGS):
        return fault
    is_users = isinstance(error, (DLRoverRLError, *_BUGS)) or getattr(error, "retryable", False) is True
    return CauseKind.USER_ERROR if is_users else CauseKind.UNKNOWN_ERROR


def fault_in(text: str) -> CauseKind:
    """DEVICE_FAILED, LINK_FAILED or UNKNOWN_ERROR, by an exception's type and message."""
    if _DEVICE.search(text):
        return CauseKind.DEVICE_FAILED
    return CauseKind.LINK_FAILED if _LINK.search(text) else CauseKind.UNKNOWN_ERROR
