# SPDX-License-Identifier: Apache-2.0
"""Writes that wait while the disk is full, instead of ending the run.

::

    write --> full --> free what is not needed --> again --> pauses, up to a limit
                   --> free what is still in use --> again --> the error, with the bytes needed and free
"""

import errno
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXT = re.compile(rf"os error ({'|'.join(map(str, _FULL))})\b")

T = TypeVar("T")


@dataclass(frozen=True)
class DiskWait:
    limit_s: float = 60.0  # time for an operator to react, but shorter than the silence of a hung process
    pause_s: float = 0.5  # between two attempts


DEFAULT_DISK_WAIT = DiskWait()


def is_disk_full(error: BaseException) -> bool:
    """Return True for a full disk or an exhausted quota; libraries written in Rust give the number in their text."""
    return error.errno in _FULL if isinstance(error, OSError) else _FULL_TEXT.search(str(error)) is not None


def disk_full_error(number: int, folder: Path, nbytes: int) -> OSError:
    """The error ``number``, with the folder, the bytes to write (0: unknown), and the free bytes."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    need = f"{nbytes} bytes do not fit, " if nbytes else ""
    return OSError(number, f"{os.strerror(number)}: {need}{free} bytes are free", str(folder))


def retry_while_full(
    write: Callable[[], T],
    path: Path,
    wait: DiskWait = DEFAULT_DISK_WAIT,
    free_space: Callable[[bool], bool] = lambda in_use: False,
) -> T:
    """Call ``write``, which must leave nothing behind when it fails, until the disk has space for it.

    ``free_space`` removes files and returns False if there were none. It is called with True after ``wait``: then it
    may also remove files that are still in use. Other errors of ``write`` are raised at once.
    """
    deadline_s = None
    while True:
        try:
            return write()
        except Exception as error:
            if not is_disk_full(error):
                raise
            if free_space(False):
                continue
            if deadline_s is None:
                deadline_s = time.monotonic() + wait.limit_s
                _LOG.warning("no disk space for %s; waiting up to %g s: %s", path, wait.limit_s, error)
            if time.monotonic() < deadline_s:
                time.sleep(wait.pause_s)
            elif not free_space(True):
                raise _as_os_error(error, path.parent) from None


def _as_os_error(error: Exception, folder: Path) -> OSError:
    return error if isinstance(error, OSError) else disk_full_error(errno.ENOSPC, folder, 0)


def append(path: Path, content: bytes, wait: DiskWait = DEFAULT_DISK_WAIT) -> None:
    """Add ``content`` to a file, whole or not at all; an absent file is created."""
    size = path.stat().st_size if path.exists() else 0
    retry_while_full(lambda: _write_at(path, size, content), path, wait)


def _write_at(path: Path, size: int, content: bytes) -> None:
    """Write from ``size`` on, over what an earlier attempt may have left there."""
    try:
        with open(path, "ab", buffering=0) as file:
            file.truncate(size)
            remaining = memoryview(content)
            while remaining:
                remaining = remaining[file.write(remaining) :]
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def replace(path: Path, content: bytes, wait: DiskWait = DEFAULT_DISK_WAIT) -> None:
    """Write a file, whole or not at all; an existing one is replaced."""
    retry_while_full(lambda: _replace(path, content), path, wait)


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}.tmp")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
