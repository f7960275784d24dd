# SPDX-License-Identifier: Apache-2.0
"""Start of a process: the protocol that starts a script's engines; the user's classes, the errors in them, and
the job's secrets, which are in the memory and the environment of its processes and nowhere else."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.disk_space import is_disk_full
from dlrover.python.rl.common.extensions import load_module
from dlrover.python.rl.common.log import hide_values, valid_text
from dlrover.python.rl.common.names import ProcessId, RLRoleType, hint
from dlrover.python.rl.config.secrets import Secrets, seal, variables_of
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import (
    COULD_NOT_START,
    LEFT_ALIVE,
    Cause,
    CauseKind,
    Event,
    Process,
    fault_in,
    fault_of,
)
from dlrover.python.rl.trainer.port import Port
from dlrover.python.rl.trainer.workload import undecorated

Emit: TypeAlias = Callable[[Event], None]


@dataclass(frozen=True)
class Device:
    """A device for one process of an engine; ``name`` is the driver's (``"0"``), ``""`` for a logical device."""

    node: str
    address: str
    kind: Literal["cuda", "cpu"] = "cpu"
    name: str = ""


class Hosting(Protocol):
    """Starts the processes of a script's engines, each of which hosts one workload. They end with the script."""

    @property
    def devices(self) -> Sequence[Device]: ...

    @property
    def port(self) -> Port: ...  # to the workloads; an engine's name is the role

    @property
    def separate(self) -> bool: ...  # each slot is a separate process

    def start(self, name: str, slots: Sequence[Sequence[int]], where: str) -> list[Process]:
        """Start a process for each of the ``slots``, the indices of its devices on one node, and construct a workload
        of the class ``where`` (``package.module:Class``) in it. The engine's ``name`` has upper-case letters, digits
        and ``_``. Raises WorkloadStartError if one does not start in time, and leaves none."""
        ...

    def end(self, name: str) -> None:
        """Close the workloads, and end the processes; busy or dead ones get only a short time."""
        ...

    def close(self) -> None: ...


def cause_of(error: BaseException, process: str, remote_traceback: str = "", alone: bool = False) -> Cause:
    """Return the cause of an error that ended a process's code; ``alone``: it cannot be tried in a fresh process."""
    cause = _cause_of(error, process, remote_traceback)
    return cause.as_users() if alone and cause.kind in LEFT_ALIVE else cause


def death_kind(why: str) -> CauseKind:
    """Return the kind of a worker's death from the text of its error."""
    kind = fault_in(why)
    return CauseKind.PROCESS_DIED if kind is CauseKind.UNKNOWN_ERROR else kind


def _cause_of(error: BaseException, process: str, remote_traceback: str) -> Cause:
    if isinstance(error, errors.WorkloadDied):
        return Cause(death_kind(_first_line(error)), str(ProcessId(error.role, error.rank)), _first_line(error))
    if isinstance(error, errors.WorkloadStartError):
        kind = CauseKind(error.fault or CauseKind.USER_ERROR)
        kind = CauseKind.START_FAILED if kind is CauseKind.USER_ERROR else kind
        return Cause(kind, error.who, f"{COULD_NOT_START}{error.summary}", error.remote_traceback)
    if isinstance(error, errors.InvocationError):
        member, detail = str(ProcessId(error.role, error.rank)), error.remote_traceback or remote_traceback
        kind = _kind_of(error.original) if error.original is not None else fault_in(_first_line(error))
        return Cause(kind, member, _first_line(error), _detail(error.original, detail))
    message = f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
    return Cause(_kind_of(error), process, message, _detail(error, remote_traceback))


def _detail(error: BaseException | None, remote_traceback: str) -> str:
    """Return the traceback; for an error in the user's input the whole message, for a full disk nothing, since their
    tracebacks show the code that checks or writes."""
    if error is not None and is_disk_full(error):
        return ""
    if not isinstance(error, errors.DataError | errors.InvalidJob):
        return remote_traceback
    message = str(error).strip()
    return message if "\n" in message else ""


def _kind_of(error: BaseException) -> CauseKind:
    if is_disk_full(error):
        return CauseKind.NO_SPACE
    if isinstance(error, errors.JobFailed | errors.MasterLost):
        return CauseKind.RETRYABLE_ERROR
    return fault_of(error)


@contextmanager
def starting(process: str) -> Iterator[None]:
    """Raise every error in the block as a WorkloadStartError of ``process``, with its message and traceback."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: every error travels on
        text, trace = map(valid_text, (f"{type(error).__name__}: {error}", errors.user_traceback(error)))
        failure = errors.WorkloadStartError(process, text, trace)
        failure.fault = fault_of(error).value
        raise failure from None


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


def restore_environment(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process, and remove those whose value is None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def enter_folder(folder: str) -> None:
    """Change to the job file's folder, where its relative paths begin, unless this node lacks it."""
    if folder and Path(folder).is_dir():
        os.chdir(folder)


def load_class(module: str, name: str, search_path: Sequence[str] = ()) -> Any:
    """Import ``module``, with ``search_path`` in ``sys.path``, and return its (possibly nested) class ``name`` without
    ``@ray.remote``. Raises ClassNotFound with the nearest name, or caused by the module's own error."""
    for folder in search_path:
        if folder not in sys.path:
            sys.path.append(folder)
    target: Any = load_module(module)
    for part in name.split("."):
        if not hasattr(target, part):
            classes = [key for key, value in vars(target).items() if isinstance(undecorated(value), type)]
            raise errors.ClassNotFound(f"module '{module}' has no class '{name}'{hint(part, classes)}")
        target = getattr(target, part)
    target = undecorated(target)
    if not isinstance(target, type):
        raise errors.ClassNotFound(f"'{module}.{name}' is a {type(target).__name__}, not a class")
    return target


def load_workload(job: JobSpec, role: str) -> Any:
    spec = job.workloads[RLRoleType(role)]
    return load_class(spec.module, spec.class_, job.search_path)


def class_at(path: str, search_path: Sequence[str] = ()) -> Any:
    module, _, name = path.partition(":")
    return load_class(module, name, search_path)


def own_search_path() -> list[str]:
    """Return the folders of ``sys.path``, where other processes find the user's modules."""
    return [os.path.abspath(folder or ".") for folder in sys.path]


_HELD: dict[str, str] = {}


def take_secrets(job: JobSpec, role: str = "") -> None:
    """Set the secret variables of the trainer or a ``role``, which its environment did not bring, in this process."""
    _, secrets = seal(job)
    hide_values(secrets.values())
    os.environ.update(variables_of(secrets, role))
    _HELD.update(secrets)


def held_secrets() -> Secrets:
    """Return the secrets of this process, for a master that has lost them."""
    return dict(_HELD)
