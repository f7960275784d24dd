"""The port through which the brain's commands become deeds."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from dlrover.python.rl.common.errors import InvocationError, JobFailed, MasterLost, WorkloadDied, WorkloadStartError
from dlrover.python.rl.control.commands import Command
from dlrover.python.rl.control.events import Cause, CauseKind, Event

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
    kind = CauseKind.RETRYABLE_ERROR if isinstance(error, JobFailed | MasterLost) else CauseKind.USER_ERROR
    message = f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
    return Cause(kind, who, message, remote_traceback)


@contextmanager
def starting(who: str) -> Iterator[None]:
    """Say of whatever is raised inside that ``who`` could not start.

    Raises:
        WorkloadStartError: with the message and the traceback of what was raised.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: whatever it raises travels on
        raise WorkloadStartError(who, f"{type(error).__name__}: {error}", traceback.format_exc()) from None


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")
