"""The port through which the brain's commands become deeds."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from dlrover.python.rl.common.errors import InvocationError, WorkloadDied, WorkloadStartError
from dlrover.python.rl.control.events import Cause, CauseKind, Command, Event

Emit: TypeAlias = Callable[[Event], None]


class Executor(Protocol):
    """Carries out commands and tells what came of them."""

    def execute(self, command: Command, emit: Emit) -> None:
        """Begin ``command``. Its outcome is told through ``emit``, now or later, on the caller's thread."""
        ...


def cause_of(error: BaseException, who: str, remote_traceback: str = "") -> Cause:
    """Classify what a trainer or workload raised."""
    if isinstance(error, WorkloadDied):
        return Cause(CauseKind.PROCESS_DIED, f"{error.role}[{error.rank}]", _first_line(error))
    if isinstance(error, InvocationError):
        return Cause(
            CauseKind.USER_ERROR,
            f"{error.role}[{error.rank}]",
            _first_line(error),
            error.remote_traceback or remote_traceback,
        )
    if isinstance(error, WorkloadStartError):
        return Cause(CauseKind.START_FAILED, error.who, f"could not start: {error.summary}", error.remote_traceback)
    message = f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
    return Cause(CauseKind.USER_ERROR, who, message, remote_traceback)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")
