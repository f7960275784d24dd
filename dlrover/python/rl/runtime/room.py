"""Writing where there may be no room: what can be spared is removed, then room is waited for, then it is given up.

::

    write --> no room --> the older generation is removed --> again --> pauses, for a while
                  --> what is being copied is removed as well --> again --> an error with the figures
"""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long to wait for room.

    Attributes:
        limit_s: seconds in all, after which the write is given up.
        pause_s: seconds between two attempts.
    """

    limit_s: float = 60.0
    pause_s: float = 0.5


PATIENT = Patience()
"""As long as somebody takes to notice, and shorter than a member may be silent."""


def says_full(error: OSError) -> bool:
    """Whether ``error`` is one of too little room, or of a quota."""
    return error.errno in _FULL


def no_room(number: int, folder: Path, nbytes: int) -> OSError:
    """The error ``number`` of a write, with the folder, the bytes that were to go there (0: unknown), and those that
    are free."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    need = f"{nbytes} bytes do not fit, " if nbytes else ""
    return OSError(number, f"{os.strerror(number)}: {need}{free} bytes are free", str(folder))


def with_room(write: Callable[[], T], make_room: Callable[[bool], bool], patience: Patience = PATIENT) -> T:
    """Call ``write``, which leaves nothing where it fails, until there is room for it.

    Args:
        write: what to do; called again from its beginning.
        make_room: removes what can be spared; whether there was anything. Called with True when waiting has not helped:
            then what somebody still uses can be spared as well.
        patience: how long to wait once there is nothing to spare.

    Raises:
        OSError: ``write`` failed of something else, or there is no room and none comes.
    """
    deadline_s = None
    while True:
        try:
            return write()
        except OSError as error:
            if not says_full(error):
                raise
            if make_room(False):
                continue
            if deadline_s is None:
                deadline_s = time.monotonic() + patience.limit_s
                _LOG.warning("waiting up to %g s for room: %s", patience.limit_s, error)
            if time.monotonic() < deadline_s:
                time.sleep(patience.pause_s)
            elif not make_room(True):
                raise
