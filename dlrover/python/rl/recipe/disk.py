"""Writing to a disk that is full for a while: a run waits for room rather than ending."""

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
class Patience:
    """How long to wait for room.

    Attributes:
        limit_s: seconds in all, after which the error is raised.
        pause_s: seconds between two attempts.
    """

    limit_s: float = 60.0
    pause_s: float = 0.5


PATIENT = Patience()
"""Through a disk that is full for as long as somebody takes to notice."""


def patiently(write: Callable[[], T], path: Path, patience: Patience = PATIENT) -> T:
    """Call ``write``, which leaves nothing where it fails, until the disk has room for it.

    Args:
        write: what to do; called again from its beginning.
        path: what it writes, for the log.
        patience: for how long.

    Raises:
        Exception: any that ``write`` raises; one that says the disk is full, after the last attempt.
    """
    deadline_s = None
    while True:
        try:
            return write()
        except Exception as error:
            if not _says_full(error) or (deadline_s is not None and time.monotonic() >= deadline_s):
                raise
            if deadline_s is None:
                deadline_s = time.monotonic() + patience.limit_s
                _LOG.warning("no room for %s, waiting up to %g s: %s", path, patience.limit_s, error)
        time.sleep(patience.pause_s)


def _says_full(error: Exception) -> bool:
    """Libraries written in Rust have errors of their own, which say the number in their text."""
    return _FULL_TEXT.search(str(error)) is not None if not isinstance(error, OSError) else error.errno in _FULL


def append(path: Path, content: bytes, patience: Patience = PATIENT) -> None:
    """Add ``content`` to a file, whole or not at all; an absent file is created.

    Opened anew each time: a run that fails leaves no file open.

    Raises:
        OSError: it cannot be written, or there is no room and none comes.
    """
    size = path.stat().st_size if path.exists() else 0
    patiently(lambda: _write_at(path, size, content), path, patience)


def _write_at(path: Path, size: int, content: bytes) -> None:
    """Write from ``size`` on; what an earlier attempt may have left there is removed."""
    try:
        with open(path, "ab", buffering=0) as file:
            file.truncate(size)
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def replace(path: Path, content: bytes, patience: Patience = PATIENT) -> None:
    """Write a file, whole or not at all; what is there is replaced.

    Raises:
        OSError: it cannot be written, or there is no room and none comes.
    """
    patiently(lambda: _replace(path, content), path, patience)


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}.tmp")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
