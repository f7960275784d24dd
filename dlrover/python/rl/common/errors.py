# SPDX-License-Identifier: Apache-2.0
"""The one error tree. Every error says whether a retry may help, and what must restart first.

::

    DLRoverRLError
    ├── InvalidJob                   the job's description is wrong; lists every error
    ├── ClassNotFound                a class of the job cannot be imported; names the missing part
    ├── MissingExtra                 an optional package is not installed; names the extra
    ├── DataError                    a data file or column is wrong; names file and line
    ├── RowsDiffer                   columns of different samples were put together
    ├── EngineError                  an engine cannot do what was asked
    │   ├── OtherLayout              a state is from ranks that divide the model differently
    │   ├── OutOfDeviceMemory        tensors do not fit the device; lists memory by owner
    │   ├── EngineDied               a process of the engine has ended, or can no longer compute
    │   ├── WeightSyncError          received weights differ from those that were sent
    │   │   └── WeightsLost          the weights of a ticket no longer exist
    │   └── NonFiniteUpdate          a loss or gradient is NaN or infinite; nothing was changed
    ├── SessionError                 an engine driven by hand was used out of order, or lacks slots
    ├── CallError                    a role-group call was refused before anything was sent
    │   ├── UnknownMethod            (also an AttributeError) no such role group or method; nearest name given
    │   └── ShardError               an argument cannot be split as requested
    ├── InvocationError              a worker's call failed: role, rank, method, node, remote traceback
    │   ├── InvocationTimeout        some ranks are late; holds the results that arrived
    │   ├── WorkloadDied             a worker's process has ended
    │   ├── ResultLost               a result that the call needs was lost with its worker
    │   ├── CallSkipped              an earlier call to the worker did not run, so this one did not either
    │   ├── ReplayDiverged           a repeated call differs from the first
    │   └── StaleCall                a call by a replaced trainer was refused
    ├── WorkloadStartError           a workload's or trainer's constructor failed
    ├── ScriptFailed                 the program of a role has ended with an error
    ├── ClusterUnavailable           Ray could not be started or reached
    ├── VerifierError                a reward function gave no reward
    │   ├── VerifierTimeout          ... within its deadline; its process was replaced
    │   └── VerifierCrashed          ... because its process ended during the call
    ├── EnvironmentFailed            an environment gave no usable answer; its sample has failed
    │   └── EnvironmentLost          ... because its process ended during the call
    ├── PlacementTimeout             the cluster did not free the resources in time
    ├── ServiceError                 the job service did not do what was asked
    │   ├── UnknownJob               it has no job of this name; nearest name given
    │   ├── AccessDenied             no token, a wrong one, or one without the right
    │   ├── ServiceBusy              the caller has too many requests at once, or too fast
    │   │   └── QuotaReached         its queue, or the caller's share of it, is full
    │   └── ServiceUnavailable       it does not answer, or cannot save what it decides
    └── JobError
        ├── JobFailed                the job ended in failure; carries the first cause
        ├── JobConflict              a job of this name exists already
        ├── MasterLost               the job's master has ended or does not answer
        ├── JournalCorrupt           the master's journal cannot be read; never treated as an empty one
        ├── CheckpointCorrupt        a checkpoint file differs from what was written; never loaded
        ├── CheckpointMissing        a checkpoint, or a file of one, does not exist
        └── StaleEpoch               a write by a replaced process was refused

``StepAbandoned`` is not an error: it unwinds a trainer's step back to the last commit."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any


class Scope(StrEnum):
    NOTHING = "nothing"
    MEMBER = "member"
    GROUP = "group"
    TRAINER = "trainer"
    JOB = "job"


class DLRoverRLError(Exception):
    """The base class. If ``retryable``, the same request may succeed once ``restarts`` has restarted."""

    retryable: bool = False
    restarts: Scope = Scope.NOTHING

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[DLRoverRLError], args: tuple[Any, ...], state: dict[str, Any]) -> DLRoverRLError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


@dataclass(frozen=True, order=True)
class ConfigError:
    """One fault of a job: its place (``trainer.class``, ``train.jsonl:7``) and its description."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class InvalidJob(DLRoverRLError):
    """A job has ``errors``; ``salvaged`` is the job without them, for finding further errors and never to be run."""

    def __init__(self, errors: Sequence[ConfigError], salvaged: Any = None) -> None:
        self.errors, self.salvaged = tuple(dict.fromkeys(errors)), salvaged
        count = len(self.errors)
        lines = "\n".join(f"  - {error}" for error in self.errors)
        super().__init__(f"{count} error{'s' if count != 1 else ''} in the job:\n{lines}")


class ClassNotFound(DLRoverRLError):
    """A class cannot be imported; the message says which part of its name is missing."""


class MissingExtra(DLRoverRLError):
    """An optional dependency is absent; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"'{package}' is not installed: pip install 'dlrover-rl[{extra}]'")


class DataError(DLRoverRLError):
    """A data file, row or column cannot be used; ``errors`` lists each place."""

    def __init__(self, errors: Sequence[ConfigError] | str) -> None:
        if isinstance(errors, str):
            errors = (ConfigError("data", errors),)
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))


class RowsDiffer(DLRoverRLError):
    """Columns to be joined belong to different samples, some of which were sampled again after they were scored."""

    retryable, restarts = True, Scope.TRAINER


class EngineError(DLRoverRLError):
    """An engine does not support a request; the message says what it supports."""


class OtherLayout(EngineError):
    """A state is from ranks that divide the model differently."""


class OutOfDeviceMemory(EngineError):
    """Tensors do not fit the device; the message reports its memory by owner."""


class EngineDied(EngineError):
    """A process of an engine has ended, or has failed so that only a new one can compute."""

    retryable, restarts = True, Scope.MEMBER


class WeightSyncError(EngineError):
    """Received weights differ from those that were sent; the message names the tensors."""

    retryable, restarts = True, Scope.TRAINER


class WeightsLost(WeightSyncError):
    """The weights of a ticket are gone: their sender died or has newer ones; ask it for another ticket."""


class NonFiniteUpdate(EngineError):
    """An update's loss or gradient is NaN or infinite. Every rank refused it, so no weight changed."""

    retryable, restarts = True, Scope.TRAINER


class SessionError(DLRoverRLError):
    """A script used its engines out of order, or asked for more slots than exist; the message says what to do."""


class CallError(DLRoverRLError):
    """A role-group call was refused before anything was sent."""


class UnknownMethod(CallError, AttributeError):
    """There is no such role group or method; the message has the nearest name."""


class ShardError(CallError):
    """An argument cannot be split over the workers as requested."""


class InvocationError(DLRoverRLError):
    """A call on one worker failed; ``original`` is the worker's own exception, None when it was not serializable."""

    original: BaseException | None = None

    def __init__(
        self, message: str, *, role: str, rank: int, method: str, node: str = "", remote_traceback: str = ""
    ) -> None:
        self.role, self.rank, self.method, self.node = role, rank, method, node
        self.remote_traceback = remote_traceback
        at = f" on {node}" if node else ""
        text = f"{role}[{rank}]{method and '.' + method}{at}: {message}"
        super().__init__(f"{text}\n\n{remote_traceback}" if remote_traceback else text)


class InvocationTimeout(InvocationError):
    """Ranks ``late`` did not answer in time; ``arrived`` maps each other rank to its result."""

    retryable, restarts = True, Scope.MEMBER

    def __init__(
        self, *, role: str, method: str, timeout_s: float, late: Sequence[int], arrived: Mapping[int, Any]
    ) -> None:
        self.late, self.arrived, self.timeout_s = tuple(late), dict(arrived), timeout_s
        ranks = f"rank{'s' if len(self.late) > 1 else ''} {', '.join(map(str, self.late))}"
        message = f"no answer within {timeout_s:g} s from {ranks} ({len(self.arrived)} arrived)"
        super().__init__(message, role=role, rank=self.late[0], method=method)


class WorkloadDied(InvocationError):
    """The process of a worker is gone. ``role`` and ``rank`` name it; it may be the source of the call's argument."""

    retryable, restarts = True, Scope.MEMBER
    incarnation = 0  # unknown


class ResultLost(InvocationError):
    """A call's result or argument is gone with its process; a workload may raise it: the arguments are made again."""

    retryable = True


class CallSkipped(InvocationError):
    """An earlier call to this worker did not run, so this one did not either: calls keep their order."""

    retryable = True


class ReplayDiverged(InvocationError):
    """A repeated step is not deterministic: a call id has another method, or another order, than before."""

    retryable, restarts = True, Scope.JOB


class StaleCall(InvocationError):
    """A call was refused: its trainer has been replaced, or its worker has been restarted."""


class WorkloadStartError(DLRoverRLError):
    """A constructor raised. ``who`` is ``"ROLLOUT[1]"`` or ``"trainer"``, ``summary`` the exception in one line."""

    fault = ""  # the exception's kind of cause

    def __init__(self, process: str, message: str, remote_traceback: str = "") -> None:
        self.who, self.summary, self.remote_traceback = process, message, remote_traceback
        text = f"{process} could not start: {message}"
        super().__init__(f"{text}\n\n{remote_traceback}" if remote_traceback else text)


class ScriptFailed(DLRoverRLError):
    """The program of a role has ended with an error; on Ray, replaced workers start it again."""

    retryable, restarts = True, Scope.MEMBER


class ClusterUnavailable(DLRoverRLError):
    """Ray could not be started or reached."""

    retryable = True


class VerifierError(DLRoverRLError):
    """A verifier gave no reward: it raised, returned a non-finite value, or could not be loaded."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        self.remote_traceback = remote_traceback
        super().__init__(f"{message}\n\n{remote_traceback}" if remote_traceback else message)


class VerifierTimeout(VerifierError):
    """A verifier gave no reward within its deadline; its process was killed and replaced."""


class VerifierCrashed(VerifierError):
    """A verifier's process ended in the middle of a call (exit code or signal in the message); it was replaced."""


class EnvironmentFailed(DLRoverRLError):
    """An environment raised, was late, or returned a wrong type; only its sample fails."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        self.remote_traceback = remote_traceback
        super().__init__(message)


class EnvironmentLost(EnvironmentFailed):
    """An environment's process ended during the call."""


class PlacementTimeout(DLRoverRLError):
    """The cluster did not have the requested resources in time; the message compares both."""

    retryable, restarts = True, Scope.JOB


class ServiceError(DLRoverRLError):
    """The job service did not do what was asked."""


class UnknownJob(ServiceError):
    """The service has no job of this name."""


class AccessDenied(ServiceError):
    """The request had no valid token, or its owner may not do this."""


class ServiceBusy(ServiceError):
    """A limit of the service on requests or their rate was reached; the message names it."""

    retryable = True


class QuotaReached(ServiceBusy):
    """The queue, or the caller's share of it, is full until a job of it starts; the message names the limit."""


class ServiceUnavailable(ServiceError):
    """The service did not answer, or could not save its decision; the request can be repeated."""

    retryable = True


class JobError(DLRoverRLError):
    """Base of the errors of a whole job."""


class JobFailed(JobError):
    """The job ended in failure; the message carries the first cause."""


class JobConflict(JobError):
    """A job of this name is running, or another run's files are in the job's folder."""


class MasterLost(JobError):
    """The job's master is gone or does not answer."""


class JournalCorrupt(JobError):
    """A line of the journal is damaged; nothing is started from it."""


class CheckpointCorrupt(JobError):
    """A checkpoint file differs from what was written."""

    def __init__(self, path: str, fault: str) -> None:
        self.path = path
        super().__init__(f"{path}: {fault}")


class CheckpointMissing(JobError):
    """A checkpoint, or one of its files, does not exist."""


class StaleEpoch(JobError):
    """A write was refused because a newer process owns the target; the writer must exit."""


class StepAbandoned(BaseException):
    """Unwinds ``init`` and ``fit``, which begin again at the last commit; a user's ``except Exception`` passes it."""

    def __init__(self, step: int, cause: BaseException) -> None:
        self.step, self.cause = step, cause
        super().__init__(step, cause)


_OWN = "dlrover.python.rl."
_STANDARD = (str(Path(traceback.__file__).parent), "<frozen ")


def user_traceback(error: BaseException, chain: bool = True) -> str:
    """Return the traceback of ``error`` from the user's first frame on, or all of it if no frame is the user's. An
    error of this package has no causes in it, and ends at the user's last frame, or is its ``remote_traceback``."""
    trace, is_own = error.__traceback__, isinstance(error, DLRoverRLError)
    while trace is not None and not _is_users(trace.tb_frame):
        trace = trace.tb_next
    if trace is None and is_own:
        return str(getattr(error, "remote_traceback", ""))
    users = [number for number, (frame, _) in enumerate(traceback.walk_tb(trace), 1) if _is_users(frame)]
    limit, trace = users[-1] if is_own else None, trace or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace, limit, chain=chain and not is_own))


def _is_users(frame: FrameType) -> bool:
    """Return True for the user's code and for libraries, which cannot be distinguished."""
    path = frame.f_code.co_filename
    is_standard = path.startswith(_STANDARD) and "site-packages" not in path
    return not is_standard and not str(frame.f_globals.get("__name__")).startswith(_OWN)
