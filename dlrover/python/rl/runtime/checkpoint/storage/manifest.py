# SPDX-License-Identifier: Apache-2.0
"""The two files that decide what a store holds: the manifest, whose appearance makes a generation valid, and the epoch
fence, which refuses a replaced process."""

import errno
import fcntl
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dlrover.python.rl.common.disk_space import naming
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.runtime.checkpoint.storage.state_file import StateFile, new_file

_LOG = get_logger(__name__)

MANIFEST = "manifest.json"
NODES = "nodes"
"""Name in ``Manifest.extra``: of the nodes that have all files of each process."""

VERSION = 1

_FOLDER = re.compile(r"step-(?P<step>\d{8,})\.e(?P<epoch>\d+)")
_LARGEST = 1 << 28


class Piece(NamedTuple):
    """A file, and the folder of its generation: in the same root, or an absolute path or URL."""

    folder: str
    file: StateFile


@dataclass(frozen=True)
class Manifest:
    """One generation: the state of every stateful member and of the trainer after ``step``."""

    step: int
    epoch: int
    run: str
    files: Mapping[str, StateFile]  # by process: "ROLLOUT-0", "trainer"
    extra: Mapping[str, Any] = field(default_factory=dict)
    serial: int = 0  # rises with each commit in its folder; the highest is the newest
    committed_at: float = 0.0

    @property
    def age(self) -> tuple[int, int]:
        """Rises with each commit of a run."""
        return self.epoch, self.serial

    @property
    def folder(self) -> str:
        return folder_name(self.step, self.epoch)


def folder_name(step: int, epoch: int) -> str:
    return f"step-{step:08d}.e{epoch}"


def step_and_epoch(name: str) -> tuple[int, int] | None:
    match = _FOLDER.fullmatch(name)
    return (int(match["step"]), int(match["epoch"])) if match else None


def encode(manifest: Manifest) -> bytes:
    fields = dict(vars(manifest), files={name: vars(file) for name, file in manifest.files.items()})
    return _sealed(json.dumps({"version": VERSION, **fields}, sort_keys=True, allow_nan=False).encode())


def _sealed(body: bytes) -> bytes:
    return b'{"crc32": "%08x", "manifest": %s}\n' % (zlib.crc32(body), body)


def decode(content: bytes) -> Manifest:
    """The inverse of :func:`encode`.

    Raises:
        ValueError: a byte is not as :func:`encode` wrote it.
        CheckpointMissing: it has calls instead of states, as commits of earlier versions could.
    """
    fields = json.loads(content)["manifest"]
    if _sealed(json.dumps(fields, sort_keys=True, allow_nan=False).encode()) != content:
        raise ValueError("it does not match its checksum")
    version = fields.pop("version")
    if version != VERSION:
        raise ValueError(f"format {version!r} instead of {VERSION}")
    files = {name: StateFile(**file) for name, file in fields.pop("files").items()}
    if fields.pop("earlier", {}):
        raise CheckpointMissing(f"step {fields['step']} was committed as calls, by an earlier version of this package")
    return Manifest(files=files, **fields)


def read_manifest(folder: Path, run: str) -> Manifest:
    """The manifest in ``folder``. Raises CheckpointMissing if there is none of this run, CheckpointCorrupt, OSError."""
    path = folder / MANIFEST
    try:
        with naming(path), open(path, "rb") as file:
            content = file.read(_LARGEST)
        manifest = decode(content)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointMissing(f"{path} is not there") from None
    except CheckpointMissing as error:
        _warn(f"{folder}: {error}; the newest whole state before it is used")
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(str(path), f"not a manifest: {error}") from error
    if manifest.run != run:
        raise CheckpointMissing(f"{path} belongs to run {manifest.run}, not to {run}")
    if manifest.folder != folder.name:
        raise CheckpointCorrupt(str(path), f"it belongs to {manifest.folder}")
    return manifest


@cache
def _warn(message: str) -> None:
    """Log it once in this process: a store is read at each commit."""
    _LOG.warning(message)


def write_manifest(folder: Path, manifest: Manifest, durable: bool) -> None:
    """Make the files in ``folder`` a generation, or leave no manifest and raise OSError."""
    path, content = folder / MANIFEST, encode(manifest)
    try:
        with new_file(path, durable, len(content)) as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)  # it may have its name already, while the name is not safe yet
        raise


LOCK_TIMEOUT_S = 30.0
TAKE_OVER_S = 5.0
"""Who takes a folder or a journal over waits so long for its lock: its holder may be frozen, or on a lost node."""

_LOCK_POLL_S = 0.002


def take_lock(handle: int, path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """flock ``handle``, an open file at ``path``, until it is closed or the process ends. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                message = f"another process has had the lock for {timeout_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, message, str(path)) from None
            time.sleep(_LOCK_POLL_S)
        else:
            return


class EpochFence:
    """The highest epoch that has claimed a folder, in its file ``EPOCH``; ``fallback`` estimates it if the file is
    damaged."""

    def __init__(self, root: Path, durable: bool, fallback: Callable[[], int]) -> None:
        self._root, self._durable, self._fallback = root, durable, fallback
        self._path, self._lock = root / "EPOCH", root / "LOCK"

    @contextmanager
    def locked(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Keep every other process from changing the folder. Raises CheckpointMissing if it is missing,
        TimeoutError."""
        handle = self._open_lock()
        try:
            take_lock(handle, self._lock, timeout_s)
            while not _is_at(handle, self._lock):  # it was taken over meanwhile
                fresh = self._open_lock()
                os.close(handle)
                handle = fresh
                take_lock(handle, self._lock, timeout_s)
            yield
        finally:
            os.close(handle)

    def _open_lock(self) -> int:
        try:
            return os.open(self._lock, os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:
            raise CheckpointMissing(f"{self._root} is not there") from None

    def take_over(self, epoch: int) -> None:
        """Refuse every lower epoch from now on. Raises StaleEpoch after a higher claim.

        A process of a lower epoch may hold the lock and be frozen, or on a node that is lost: then the lock is replaced
        by another one. When that process goes on, it can finish the change that it was at, which removes nothing that a
        higher epoch has written, nor the newest generation before."""
        try:
            with self.locked(TAKE_OVER_S):
                self.claim(epoch)
        except TimeoutError as error:
            _LOG.warning("taking %s over without its lock: %s", self._root, error)
            self.claim(epoch)
            fresh = self._lock.with_name(f".{self._lock.name}.{epoch}.tmp")
            os.close(os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600))
            fresh.replace(self._lock)

    def check(self, epoch: int) -> None:
        """Raise StaleEpoch if a higher epoch than ``epoch`` has claimed the folder."""
        highest = self.highest()
        if epoch < highest:
            raise StaleEpoch(f"epoch {epoch} has ended: epoch {highest} has taken over {self._root}")

    def claim(self, epoch: int) -> None:
        """Refuse every lower epoch from now on; call it under the lock. Raises StaleEpoch after a higher claim."""
        self.check(epoch)
        if self._content() != _line(epoch):
            with new_file(self._path, self._durable) as file:
                file.write(_line(epoch))

    def _content(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def highest(self) -> int:
        content = self._content()
        digits = (content or b"").partition(b" ")[0]
        if digits.isdigit() and content == _line(int(digits)):
            return int(digits)
        if content is not None:
            _LOG.warning("%s is damaged: using the highest epoch that has written", self._path)
        return self._fallback()


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _line(epoch: int) -> bytes:
    text = b"%d" % epoch
    return b"%s %08x\n" % (text, zlib.crc32(text))
