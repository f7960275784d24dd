"""The one error tree. Every error says whether trying again may help, and what must restart for that.

::

    DLRoverRLError
    ├── InvalidJob                   the job's description is wrong; lists every problem
    ├── ClassNotFound                a class of the job cannot be imported; names the missing part
    ├── MissingExtra                 an optional engine is not installed; names the extra
    ├── DataError                    a data file or column is wrong; names file and line
    ├── RowsDiffer                   columns that were put together are of different samples
    ├── EngineError                  an engine was asked for what it cannot do
    │   ├── OutOfDeviceMemory        tensors do not fit the device; names who holds what
    │   ├── WeightSyncError          received weights are not the ones that were sent
    │   │   └── WeightsLost          the weights that a ticket names are nowhere any more
    │   └── NonFiniteUpdate          an update had a loss or gradient that is no number; nothing was changed
    ├── SessionError                 an engine driven by hand was used out of order, or asked for slots there are not
    ├── CallError                    a role-group call that was refused before anything was sent
    │   ├── UnknownMethod            (also an AttributeError) no such role group or method; nearest name given
    │   └── ShardError               an argument cannot be split as asked
    ├── InvocationError              a member's call failed: role, rank, method, node, remote traceback
    │   ├── InvocationTimeout        some ranks are late; what did arrive is kept
    │   ├── WorkloadDied             a member's process is gone
    │   ├── ResultLost               a result that the call was to take is gone with the place that held it
    │   ├── CallSkipped              an earlier call to the member did not run, so this one was not run either
    │   ├── ReplayDiverged           a repeated call is another one than before
    │   └── StaleCall                a call by a trainer that has been replaced was refused
    ├── WorkloadStartError           a workload's or trainer's constructor failed
    ├── ClusterUnavailable           Ray could not be started or reached
    ├── VerifierError                a reward function gave no reward
    │   ├── VerifierTimeout          ... within its deadline; its process was replaced
    │   └── VerifierCrashed          ... its process ended in the middle of a call
    ├── EnvironmentFailed            an environment gave no usable answer; the sample that asked has failed
    ├── PlacementTimeout             the cluster did not free the resources in time
    └── JobError
        ├── JobFailed                the job ended in failure; carries the first cause
        ├── JobConflict              a job of this name is already there
        ├── MasterLost               the job's master is gone or does not answer
        ├── JournalCorrupt           the master's journal cannot be read; never taken for an empty one
        ├── CheckpointCorrupt        a checkpoint file is not what was written; never loaded
        ├── CheckpointMissing        a checkpoint, or a file of one, is not there
        └── StaleEpoch               a write by a process whose successor has taken over was refused

Beside the tree stands ``StepAbandoned``, which is no error but the way back to the last commit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Scope(StrEnum):
    """What must restart before an operation that failed can succeed."""

    NOTHING = "nothing"
    MEMBER = "member"
    GROUP = "group"
    TRAINER = "trainer"
    JOB = "job"


class DLRoverRLError(Exception):
    """Base of every error this package raises on purpose."""

    retryable: bool = False
    """True when the same request may succeed after ``restarts`` has restarted."""

    restarts: Scope = Scope.NOTHING
    """What has to restart before a retry makes sense."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[DLRoverRLError], args: tuple[Any, ...], state: dict[str, Any]) -> DLRoverRLError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong with a job: where it stands (``trainer.class``, ``train.jsonl:7``) and what is wrong."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class InvalidJob(DLRoverRLError):
    """The description of a job is wrong.

    Attributes:
        problems: everything that was found, not only the first.
        salvaged: the job as far as it could be read, for finding further problems; never to be run. None when too
            little was left of it.
    """

    def __init__(self, problems: Sequence[Problem], salvaged: Any = None) -> None:
        self.problems, self.salvaged = tuple(problems), salvaged
        count = len(self.problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the job:\n{lines}")


class ClassNotFound(DLRoverRLError):
    """A class of the job cannot be imported; the message says which part is missing."""


class MissingExtra(DLRoverRLError):
    """An optional dependency is absent; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"'{package}' is not installed: pip install 'dlrover-rl[{extra}]'")


class DataError(DLRoverRLError):
    """A data file, row or column cannot be used. ``problems`` lists each place."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = (Problem("data", problems),)
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RowsDiffer(DLRoverRLError):
    """Columns that were to be put together are of different samples: some were drawn anew after they had been judged.

    Nothing was trained on them. The step is worth redoing from the last committed state.
    """

    retryable = True
    restarts = Scope.TRAINER


class EngineError(DLRoverRLError):
    """An engine was asked for something it cannot do; the message says what it can."""


class OutOfDeviceMemory(EngineError):
    """Tensors do not fit the device; the message names who holds how much of it."""


class WeightSyncError(EngineError):
    """Weights that arrived differ from the ones that were sent; the message names the tensors.

    Nothing was sampled from them. The step is worth redoing: the weights are then sent again.
    """

    retryable = True
    restarts = Scope.TRAINER


class WeightsLost(WeightSyncError):
    """The weights that a ticket names cannot be had: their sender is gone, or has gone on to later ones.

    Nothing was received. Whoever has the ticket asks the sender, or who took its place, for another one.
    """


class NonFiniteUpdate(EngineError):
    """An update's loss or gradient is NaN or infinite; the message names the first place where it is.

    The update was refused on every rank, and the weights are what they were. It may have been a fault of the moment, so
    the step is worth redoing from the last committed state.
    """

    retryable = True
    restarts = Scope.TRAINER


class SessionError(DLRoverRLError):
    """A script used its engines out of order, or asked for slots that there are not; the message says what to do."""


class CallError(DLRoverRLError):
    """A role-group call was refused before anything was sent."""


class UnknownMethod(CallError, AttributeError):
    """The role group, or the method on it, does not exist; the message gives the nearest name."""


class ShardError(CallError):
    """An argument cannot be split over the members as asked."""


class InvocationError(DLRoverRLError):
    """A call on one member of a role group failed.

    Attributes:
        role: the role called.
        rank: the rank that failed.
        method: the method called.
        node: the host the member ran on, or ``""`` when unknown.
        remote_traceback: the traceback text from the member's process, or ``""``.

    The member's own exception is ``original``, and ``__cause__``, when it could be carried over.
    """

    original: BaseException | None = None

    def __init__(
        self, message: str, *, role: str, rank: int, method: str, node: str = "", remote_traceback: str = ""
    ) -> None:
        self.role, self.rank, self.method, self.node = role, rank, method, node
        self.remote_traceback = remote_traceback
        at = f" on {node}" if node else ""
        text = f"{role}[{rank}].{method}{at}: {message}"
        super().__init__(f"{text}\n\n{remote_traceback}" if remote_traceback else text)


class InvocationTimeout(InvocationError):
    """Some ranks did not answer in time. ``late`` lists them; ``arrived`` maps each other rank to its result."""

    retryable = True
    restarts = Scope.MEMBER

    def __init__(
        self, *, role: str, method: str, timeout_s: float, late: Sequence[int], arrived: Mapping[int, Any]
    ) -> None:
        self.late, self.arrived, self.timeout_s = tuple(late), dict(arrived), timeout_s
        names = ", ".join(str(rank) for rank in self.late)
        super().__init__(
            f"no answer within {timeout_s:g} s from rank{'s' if len(self.late) > 1 else ''} {names}"
            f" ({len(self.arrived)} arrived)",
            role=role,
            rank=self.late[0],
            method=method,
        )


class WorkloadDied(InvocationError):
    """The process of a member is gone (killed, crashed, out of memory, or its node lost).

    ``role`` and ``rank`` are those of the member that died, which may be one whose result the failed call was to take.

    Attributes:
        incarnation: the one that died, 0 when unknown.
    """

    retryable = True
    restarts = Scope.MEMBER
    incarnation = 0


class ResultLost(InvocationError):
    """A result that this call was to take, or its own, is gone with the node or process that held it.

    A workload's method may raise it too, when what an argument stands for is gone. The call counts as not run then: the
    calls that made its arguments are made again, and it after them.
    """

    retryable = True


class CallSkipped(InvocationError):
    """An earlier call to this member did not run, so this one was not run either: their order would have changed."""

    retryable = True


class ReplayDiverged(InvocationError):
    """A call repeats the id of an earlier one, and is another method or comes in another order: the trainer did not do
    again what it did before."""

    retryable = True
    restarts = Scope.JOB


class StaleCall(InvocationError):
    """A call was refused: its trainer has been replaced, or it is meant for another incarnation of the member."""


class WorkloadStartError(DLRoverRLError):
    """A constructor raised while the job was starting.

    Attributes:
        who: ``"ROLLOUT[1]"`` or ``"trainer"``.
        summary: the exception's type and message.
        remote_traceback: its traceback.
    """

    def __init__(self, who: str, message: str, remote_traceback: str = "") -> None:
        self.who, self.summary, self.remote_traceback = who, message, remote_traceback
        text = f"{who} could not start: {message}"
        super().__init__(f"{text}\n\n{remote_traceback}" if remote_traceback else text)


class ClusterUnavailable(DLRoverRLError):
    """Ray could not be started or reached."""

    retryable = True


class VerifierError(DLRoverRLError):
    """A verifier gave no reward: it raised, returned no finite number, or could not be loaded.

    Attributes:
        remote_traceback: the traceback text from the child process, or ``""``.
    """

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        self.remote_traceback = remote_traceback
        super().__init__(f"{message}\n\n{remote_traceback}" if remote_traceback else message)


class VerifierTimeout(VerifierError):
    """A verifier gave no reward within its deadline; its process was killed and replaced."""


class VerifierCrashed(VerifierError):
    """A verifier's process ended in the middle of a call (exit code or signal in the message); it was replaced."""


class EnvironmentFailed(DLRoverRLError):
    """An environment gave no usable answer: it raised, was late, or returned something else than it should.

    The sample that asked has failed; others of the same environment are not touched, but where its process had to go.

    Attributes:
        remote_traceback: the traceback text of the user's code, or ``""``.
    """

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        self.remote_traceback = remote_traceback
        super().__init__(message)


class PlacementTimeout(DLRoverRLError):
    """The cluster did not have the asked resources within the deadline; the message shows need and have."""

    retryable = True
    restarts = Scope.JOB


class JobError(DLRoverRLError):
    """Something about the job as a whole."""


class JobFailed(JobError):
    """The job ended in failure; the message carries the first cause."""


class JobConflict(JobError):
    """A job of this name is already running."""


class MasterLost(JobError):
    """The job's master is gone, or does not answer."""


class JournalCorrupt(JobError):
    """The journal holds a line that cannot be trusted. Nothing is started from it."""


class CheckpointCorrupt(JobError):
    """A checkpoint file is not what was written. ``path`` is the file; ``what`` says what is wrong with it."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{path}: {what}")


class CheckpointMissing(JobError):
    """A checkpoint, or a file that belongs to one, is not there."""


class StaleEpoch(JobError):
    """A write was refused: a newer process has taken over what the writer once owned. It must end itself."""


class StepAbandoned(BaseException):
    """The open step cannot go on: it leaves ``init`` and ``fit`` to begin again at the last commit.

    It passes a user's ``except Exception``, which could not do anything about it.

    Attributes:
        step: the step that is given up.
        cause: why.
    """

    def __init__(self, step: int, cause: BaseException) -> None:
        self.step, self.cause = step, cause
        super().__init__(step, cause)
