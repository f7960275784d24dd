"""Locks between processes, and the fence that keeps a process out whose successor has taken over."""

import errno
import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dlrover.python.rl.common.errors import CheckpointMissing, StaleEpoch
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.runtime.state_file import new_file

_LOG = get_logger(__name__)

LOCK_TIMEOUT_S = 30.0
"""How long to wait for another process that changes the same thing. The kernel gives the lock of a dead one back."""

_LOCK_POLL_S = 0.002


def take_lock(handle: int, path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """flock ``handle``, an open file at ``path``; given back when the file is closed or the process ends.

    Raises:
        TimeoutError: somebody else holds it for all of ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                what = f"another process has had the lock for {timeout_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, what, str(path)) from None
            time.sleep(_LOCK_POLL_S)
        else:
            return


class EpochFence:
    """The highest epoch that has claimed a folder, in the folder's file ``EPOCH``.

    Args:
        root: the folder.
        durable: sync the file to disk.
        fallback: the highest epoch as far as it can be told without the file, for the case that it is damaged.
    """

    def __init__(self, root: Path, durable: bool, fallback: Callable[[], int]) -> None:
        self._root, self._durable, self._fallback = root, durable, fallback

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process from changing the folder.

        Raises:
            CheckpointMissing: there is no such folder.
            TimeoutError: another process holds it for too long.
        """
        path = self._root / "LOCK"
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:
            raise CheckpointMissing(f"{self._root} is not there") from None
        try:
            take_lock(handle, path)
            yield
        finally:
            os.close(handle)

    def check(self, epoch: int) -> None:
        """Refuse ``epoch`` when a higher one has claimed the folder.

        Raises:
            StaleEpoch: it has.
        """
        highest = self._highest()
        if epoch < highest:
            raise StaleEpoch(f"epoch {epoch} has ended: epoch {highest} has taken over {self._root}")

    def claim(self, epoch: int) -> None:
        """Refuse every epoch lower than ``epoch`` from now on; to be called under the lock.

        Raises:
            StaleEpoch: a higher epoch has claimed the folder.
        """
        self.check(epoch)
        if self._content() != _line(epoch):
            with new_file(self._path, self._durable) as file:
                file.write(_line(epoch))

    @property
    def _path(self) -> Path:
        return self._root / "EPOCH"

    def _content(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def _highest(self) -> int:
        content = self._content()
        digits = (content or b"").partition(b" ")[0]
        if digits.isdigit() and content == _line(int(digits)):
            return int(digits)
        if content is not None:
            _LOG.warning("%s is damaged: going by the highest epoch that has written", self._path)
        return self._fallback()


def _line(epoch: int) -> bytes:
    text = b"%d" % epoch
    return b"%s %08x\n" % (text, zlib.crc32(text))
