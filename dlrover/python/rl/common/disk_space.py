# SPDX-License-Identifier: Apache-2.0
"""Reads and writes that are retried, instead of ending the run, while the disk is full or a network disk fails.

::

    write --> full --> free what is not needed --> again --> pauses, up to a limit
                   --> free what is still in use --> again --> the error, with the bytes needed and free
          --> EIO, ESTALE, ETIMEDOUT, ... --> pauses, up to another limit --> the error"""

import asyncio
import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TRANSIENT = frozenset(
    {
        *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET),
        *(errno.ECONNREFUSED, errno.EPIPE, errno.ECONNABORTED),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)
_FULL_TEXT = re.compile(rf"os error ({'|'.join(map(str, _FULL))})\b")

T = TypeVar("T")


@dataclass(frozen=True)
class DiskWait:
    limit_s: float = 60.0  # time for an operator to react, shorter than the timeout of a hung process
    pause_s: float = 0.5  # between two attempts
    transient_s: float = 30.0  # for errors that a server's restart or another path fixes


DEFAULT_DISK_WAIT = DiskWait()


def is_disk_full(error: BaseException) -> bool:
    """Return True for a full disk or an exhausted quota; libraries in Rust have the number in their text."""
    return error.errno in _FULL if isinstance(error, OSError) else _FULL_TEXT.search(str(error)) is not None


def is_transient(error: BaseException) -> bool:
    """Return True for an error of a disk or its network that may be over soon."""
    return isinstance(error, OSError) and error.errno in _TRANSIENT


def disk_full_error(number: int, folder: Path, nbytes: int) -> OSError:
    """Return the error ``number`` with the folder, the bytes to write (0: unknown), and the free bytes or inodes."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_files and not disk.f_favail and free > nbytes:
        return OSError(number, f"{os.strerror(number)}: no inodes are free: remove files", str(folder))
    need = f"{nbytes} bytes do not fit, " if nbytes else ""
    return OSError(number, f"{os.strerror(number)}: {need}{free} bytes are free", str(folder))


def retry_io(
    act: Callable[[], T],
    path: Path | str,
    wait: DiskWait = DEFAULT_DISK_WAIT,
    free_space: Callable[[bool], bool] = lambda in_use: False,
) -> T:
    """Call ``act``, which must leave nothing behind when it fails, until the disk has space for it and answers.

    ``free_space`` removes files and returns False if there were none; after ``wait`` it is called with True, and may
    also remove files that are still in use. Other errors of ``act`` are raised at once."""
    deadlines_s: dict[bool, float] = {}
    while True:
        try:
            return act()
        except Exception as error:
            is_full = is_disk_full(error)
            if is_full and free_space(False):
                continue
            if _may_recover(error, path, wait, deadlines_s, time.monotonic()):
                time.sleep(wait.pause_s)
                continue
            if not is_full:
                raise
            if not free_space(True):
                raise _as_os_error(error, Path(path)) from None


async def retry_io_async(
    act: Callable[[], T],
    path: Path,
    wait: DiskWait = DEFAULT_DISK_WAIT,
    now_s: Callable[[], float] = time.monotonic,
) -> T:
    """Like :func:`retry_io` on an event loop, which runs between two attempts."""
    deadlines_s: dict[bool, float] = {}
    while True:
        try:
            return act()
        except OSError as error:
            if not _may_recover(error, path, wait, deadlines_s, now_s()):
                raise _as_os_error(error, path) from None
        await asyncio.sleep(wait.pause_s)


def _may_recover(
    error: Exception, path: Path | str, wait: DiskWait, deadlines_s: dict[bool, float], now_s: float
) -> bool:
    """Return True until a limit after the first error; a full disk and a failing disk have separate limits."""
    is_full = is_disk_full(error)
    limit_s = wait.limit_s if is_full else wait.transient_s if is_transient(error) else 0.0
    if limit_s and is_full not in deadlines_s:
        deadlines_s[is_full] = now_s + limit_s
        message = f"no disk space for {path}; waiting" if is_full else f"{path}; trying again for"
        _LOG.warning("%s up to %g s: %s", message, limit_s, error)
    return bool(limit_s) and now_s < deadlines_s[is_full]


def _as_os_error(error: Exception, path: Path) -> OSError:
    """Return the error with its file, which errors of an open file do not name."""
    if not isinstance(error, OSError):
        return disk_full_error(errno.ENOSPC, path.parent, 0)
    if error.filename is None and error.errno is not None:
        error.filename = str(path)
    return error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of the block name the file ``path``."""
    try:
        yield
    except OSError as error:
        raise _as_os_error(error, path) from None


def append(path: Path, content: bytes, wait: DiskWait = DEFAULT_DISK_WAIT, at: int | None = None) -> int:
    """Add ``content`` to a file, all or nothing, at its end or in place of all from byte ``at`` on; return its size."""
    size = path.stat().st_size if path.exists() else 0
    size = size if at is None else min(at, size)
    retry_io(lambda: _write_at(path, size, content), path, wait)
    return size + len(content)


def _write_at(path: Path, size: int, content: bytes) -> None:
    """Write from ``size`` on, over the remains of an earlier attempt."""
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
    """Write or replace a file, all or nothing."""
    fresh = path.with_name(f".{path.name}.tmp")

    def write() -> None:
        try:
            fresh.write_bytes(content)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)

    retry_io(write, path, wait)
