# SPDX-License-Identifier: Apache-2.0
"""The input of the state machine: facts, which are journalled. Commands are not, since the facts yield them again.

Three numbers distinguish a process from its predecessors. The job's *incarnation* rises when everything restarts. A
worker's *incarnation* and the trainer's *epoch* rise each time the process of the worker or trainer is replaced. Events
with an older number are ignored."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dlrover.python.rl.common.errors import DLRoverRLError
from dlrover.python.rl.common.log import cut_middle, redacted, valid_text
from dlrover.python.rl.common.names import ProcessId, ProcessKind


class CauseKind(StrEnum):
    USER_ERROR = "user_error"  # the user's code raised; not retried
    UNKNOWN_ERROR = "unknown_error"  # an exception that the machine may have caused: tried once more in fresh processes
    DEVICE_FAILED = "device_failed"  # a GPU or its driver; its process is replaced
    LINK_FAILED = "link_failed"  # a collective or rendezvous; its process is replaced
    RETRYABLE_ERROR = "retryable_error"  # the user's code raised an error that says that a retry may help
    START_FAILED = "start_failed"  # a constructor raised; not retried
    PROCESS_DIED = "process_died"
    OUT_OF_MEMORY = "out_of_memory"
    NO_SPACE = "no_space"  # a disk stayed full; not retried
    NODE_LOST = "node_lost"
    HUNG = "hung"  # no progress within the role's time limit; the process was killed
    PREEMPTED = "preempted"  # its group had to restart, or its node will be taken away; counts towards no limit
    NO_RESOURCES = "no_resources"  # the cluster did not have them in time
    INTERNAL = "internal"  # a fault of this system


RETRYABLE = frozenset(CauseKind) - {
    *(CauseKind.USER_ERROR, CauseKind.UNKNOWN_ERROR, CauseKind.START_FAILED),
    *(CauseKind.NO_SPACE, CauseKind.NO_RESOURCES, CauseKind.INTERNAL),
}

LEFT_ALIVE = frozenset({CauseKind.UNKNOWN_ERROR, CauseKind.DEVICE_FAILED, CauseKind.LINK_FAILED})
"""Causes after which the process still runs, and must be ended."""

MOST_DETAIL = 1 << 14
"""Characters of one cause's detail in the journal."""

COULD_NOT_START = "could not start: "

_MOST_MESSAGE = 600
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Cause:
    """The reason for which a process or the job failed."""

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
        """Return True for the same error of the same role, ignoring the numbers in its message."""
        return self.role == other.role and _NUMBER.sub("#", self.message) == _NUMBER.sub("#", other.message)

    def as_users(self) -> "Cause":
        """Return this unknown error, which has recurred in fresh processes, as an error of the user's code."""
        is_start = self.message.startswith(COULD_NOT_START)
        return replace(self, kind=CauseKind.START_FAILED if is_start else CauseKind.USER_ERROR)

    @property
    def role(self) -> str:
        """``"ROLLOUT"`` for ``"ROLLOUT[1]"``; ``"trainer"`` and ``"job"`` stay."""
        return ProcessId.parse(self.who).role if "[" in self.who else self.who


class RecoveryScope(StrEnum):
    """The workers that restart when one is lost: that worker alone, or all ranks of a role that meet in collectives."""

    MEMBER = "member"
    GROUP = "group"


@dataclass(frozen=True)
class RoleSettings:
    """The size of one role, and its settings for recovery."""

    num: int
    scope: RecoveryScope = RecoveryScope.MEMBER
    standby: int = 0
    max_restart: int | None = None  # within the window; None: the job's limit
    least: int = 0  # minimum workers with which the job continues while others cannot be placed; 0: all
    rejoins: bool = False  # GROUP only: ranks that are still up keep their processes when another is lost


@dataclass(frozen=True)
class Process:
    node: str = ""  # id of its node
    pid: int = 0
    host: str = ""  # the node's name, for people
    address: str = ""
    port: int = -1  # a TCP port that is kept free for a rendezvous; -1 for none
    slot: int = -1  # its number among the slots of its role: workers' first, then standbys'; -1 for none
    devices: str = ""  # ids of its accelerators on that node, "0,1"


class Event:
    """A fact that the journal may list, by the name of its class."""


@dataclass(frozen=True)
class Submitted(Event):
    """A job is to be run. Limits count restarts within ``window_s``."""

    job: str
    roles: Mapping[str, RoleSettings]
    run: str = "0"  # unique among the runs of this job name; part of every actor's name
    job_max_restart: int = 10
    trainer_max_restart: int = 10
    backoff_s: float = 1.0  # wait before the second restart without progress in between; doubles at each further one
    window_s: float = 3600.0
    node_max_failures: int = 3  # lost processes before a node is excluded; a lost node is excluded at once
    first: int = 1  # number of the first processes; if the run has moved to a new cluster, above all earlier numbers


@dataclass(frozen=True)
class MasterStarted(Event):
    """The master's process is up, for the first time or again."""

    node: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Placed(Event):
    """The job's resources are reserved."""

    incarnation: int


@dataclass(frozen=True)
class MemberStarted(Event):
    """A workload's constructor has returned."""

    role: str
    rank: int
    incarnation: int
    process: Process = field(default_factory=Process)
    standby: int = -1  # number of the standby that it was, -1 for none
    born: int = 0  # the first incarnation in its process, 0: this one


@dataclass(frozen=True)
class MemberLost(Event):
    """A worker's process is gone, or hung and was killed; ``node`` is ``""`` if unknown."""

    role: str
    rank: int
    incarnation: int
    cause: Cause
    node: str = ""


@dataclass(frozen=True)
class StandbyReady(Event):
    """A standby is up and has imported what it will need."""

    role: str
    number: int
    process: Process = field(default_factory=Process)


@dataclass(frozen=True)
class StandbyLost(Event):
    """A standby is gone, before it was needed or while it was becoming a worker."""

    role: str
    number: int
    cause: Cause
    node: str = ""


@dataclass(frozen=True)
class TrainerStarted(Event):
    epoch: int
    process: Process = field(default_factory=Process)


@dataclass(frozen=True)
class StepsOpened(Event):
    """The trainer has entered ``steps()``: from now on failures are recovered by scope instead of a restart of all."""

    epoch: int


@dataclass(frozen=True)
class Progressed(Event):
    """The trainer has committed ``step``; reported after a recovery, not at each step."""

    epoch: int
    step: int


@dataclass(frozen=True)
class TrainerFinished(Event):
    """``fit`` has returned."""

    epoch: int


@dataclass(frozen=True)
class TrainerLost(Event):
    """The trainer's process is gone, hung and was killed, or ``fit`` raised."""

    epoch: int
    cause: Cause
    node: str = ""


def make_lost_event(process_id: ProcessId, number: int, cause: Cause, node: str = "") -> Event:
    if process_id.kind is ProcessKind.TRAINER:
        return TrainerLost(number, cause, node)
    if process_id.kind is ProcessKind.STANDBY:
        return StandbyLost(process_id.role, process_id.rank, cause, node)
    return MemberLost(process_id.role, process_id.rank, number, cause, node)


@dataclass(frozen=True)
class NodeLost(Event):
    """A node is gone, with everything of the job that ran on it."""

    node: str
    cause: Cause


@dataclass(frozen=True)
class Failed(Event):
    """A failure of the placement or of the system itself, rather than of one process."""

    incarnation: int
    cause: Cause


@dataclass(frozen=True)
class Released(Event):
    """This incarnation of the job has no process and no reserved resource any more."""

    incarnation: int


@dataclass(frozen=True)
class WaitOver(Event):
    """The back-off of a :class:`Wait` is over."""

    timer: str


@dataclass(frozen=True)
class Resized(Event):
    """A stateless role is to have ``num`` workers; the places of additional ones are reserved."""

    role: str
    num: int
    wanted: int = 0  # the size to which the role grows once its workers can be placed; 0: it does not grow


@dataclass(frozen=True)
class Unplaced(Event):
    """There is no place for a worker of a role."""

    role: str
    rank: int
    incarnation: int
    cause: Cause


@dataclass(frozen=True)
class StopRequested(Event):
    reason: str


# -- the fault behind an exception ------------------------------------------------------------------------------------

# Error messages of CUDA, NCCL, Gloo and torch's rendezvous. A device, driver or link that fails raises an ordinary
# exception in the process that uses it, and leaves that process unusable.
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
    """Classify an exception by its type and message: DEVICE_FAILED, LINK_FAILED, USER_ERROR or UNKNOWN_ERROR. A
    ``RuntimeError`` with any other message is unknown, as is every exception that a library defines."""
    fault = fault_in(f"{type(error).__name__}: {error}")
    if fault is not CauseKind.UNKNOWN_ERROR and not isinstance(error, _BUGS):
        return fault
    is_users = isinstance(error, (DLRoverRLError, *_BUGS)) or getattr(error, "retryable", False) is True
    return CauseKind.USER_ERROR if is_users else CauseKind.UNKNOWN_ERROR


def fault_in(text: str) -> CauseKind:
    """Return DEVICE_FAILED, LINK_FAILED or UNKNOWN_ERROR for an exception's type and message."""
    if _DEVICE.search(text):
        return CauseKind.DEVICE_FAILED
    return CauseKind.LINK_FAILED if _LINK.search(text) else CauseKind.UNKNOWN_ERROR
