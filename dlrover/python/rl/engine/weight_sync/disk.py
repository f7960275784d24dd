# SPDX-License-Identifier: Apache-2.0
"""Weights in files of a folder that both sides see.

::

    folder/
      ACTOR-<run>.sender               locked (flock) by the process that sends; has its name and the ticket
      ACTOR-<run>.<ticket id>.part     while it is written
      ACTOR-<run>.<ticket id>.weights  one version: the tensors, then the seal

The last version remains, for a replaced receiver, while the next is written. Several runs may share a folder. The next
sender of the run removes the files of a crash, and after a day the senders of other runs do; a version that is used for
longer is renewed.
"""

import errno
import fcntl
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from dlrover.python.rl.common.disk_space import is_disk_full
from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.engine.weight_sync.base import (
    Pieces,
    Seal,
    SenderBase,
    StallTimer,
    SyncSettings,
    Ticket,
    assemble_snapshot,
)
from dlrover.python.rl.engine.weight_sync.buckets import CrcTally, HostArena, copy_to_host, reserve, try_lock

_WEIGHTS, _PART, _SENDER = ".weights", ".part", ".sender"
_SENDER_BYTES = 1024
_LOCK_TIMEOUT_S = 2.0
_ABANDONED_S = 86400.0

_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})
"""Errors that repeating the step does not fix."""


class DiskTransport(SenderBase):
    """Implements ``WeightTransport`` for any number of receivers, at any time. The settings need a ``folder``; their
    ``channel`` is the first part of file names, and has neither a dot nor a slash."""

    sends_adapters_alone = True

    def __init__(self, settings: SyncSettings) -> None:
        super().__init__(settings)
        if settings.folder is None:
            raise ValueError("'disk' needs a folder that both sides see")
        if not settings.channel or {".", "/"} & set(settings.channel):
            raise ValueError(f"'{settings.channel}' cannot name a sender: it is the first part of file names")
        self._folder, self._last = settings.folder, ""
        self._sender_path = self._folder / f"{settings.channel}{_SENDER}"
        self._arena = HostArena()

    def _write(self, ticket: Ticket, pieces: Pieces) -> WeightStamp:
        part, tally = self._path(ticket.id, _PART), CrcTally(ticket.table)
        with self._locked(ticket), self._opened(part, ticket.table.nbytes + Seal.size(ticket.table)) as file:
            buffer = np.empty(self.settings.bucket, dtype=np.uint8)
            for offset, piece in pieces:  # an OSError of the source does not name the folder
                data = buffer[: len(piece)]
                copy_to_host(data, piece)
                tally.update(data, offset, offset + len(piece))
                with self._naming_folder():
                    _write_exactly(file, data.data, offset)
            seal = Seal.of(ticket, tally.crcs)
            with self._naming_folder():
                _write_exactly(file, memoryview(seal.pack()), ticket.table.nbytes)
                os.fsync(file)
                part.rename(self._path(ticket.id))
            self._last = ticket.id
        return seal.stamp

    def keeps(self, ticket: Ticket) -> bool:
        """Return True if the file is still there, and renew it: for another day no sender removes it."""
        if not self.settings.is_leader:
            return True
        try:
            for path in (self._path(ticket.id), self._sender_path):
                os.utime(path)
        except OSError:
            return False
        return True

    @contextmanager
    def _opened(self, part: Path, size: int) -> Iterator[int]:
        """Create a file of this size, after removing all files but the last version; yields its descriptor."""
        with self._naming_folder():
            last = self._path(self._last)
            for path in [*self._files(_WEIGHTS, _PART), *self._abandoned()]:
                if path != last or last.stem == part.stem:
                    path.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            with self._naming_folder():
                reserve(descriptor, 0, size)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _naming_folder(self, done: str = "written to") -> Iterator[None]:
        """Raise an OSError as WeightSyncError, or as EngineError if repeating the step does not fix it. The error of a
        full disk stays an OSError, since it gives a job's end its cause."""
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                raise
            message = f"weights cannot be {done} {self._folder}: {error.strerror or error}"
            raise (EngineError if error.errno in _LASTING else WeightSyncError)(message) from error

    def _path(self, ticket_id: str, suffix: str = _WEIGHTS) -> Path:
        return self._folder / f"{self.settings.channel}.{ticket_id}{suffix}"

    @contextmanager
    def _locked(self, ticket: Ticket) -> Iterator[None]:
        """Hold the sender's lock, which the kernel releases when this process ends."""
        with self._naming_folder():
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._sender_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._naming_folder():
                timer = StallTimer(_LOCK_TIMEOUT_S, lambda: f"{_read_sender(descriptor)[1]} sends already")
                while not try_lock(descriptor, fcntl.LOCK_EX):  # receivers test the lock for an instant
                    timer.pause()
                sender = json.dumps({"name": self.settings.name, "pid": os.getpid(), "ticket": ticket.id})
                os.pwrite(descriptor, sender.encode().ljust(_SENDER_BYTES), 0)
            yield
        finally:
            os.close(descriptor)

    def _files(self, *suffixes: str) -> list[Path]:
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        prefix = f"{self.settings.channel}."
        return [path for path in paths if path.name.startswith(prefix) and path.suffix in suffixes]

    def _abandoned(self) -> Iterator[Path]:
        """Find the files that killed senders of other runs have left in this folder."""
        kind, kinds = self.settings.channel.partition("-")[0], (_WEIGHTS, _PART, _SENDER)
        for path in self._folder.glob(f"{kind}*"):
            with suppress(FileNotFoundError):
                if path.suffix in kinds and time.time() - path.stat().st_mtime > _ABANDONED_S:
                    yield path

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        ticket.check_whole()
        path, size = self._path(ticket.id), ticket.table.nbytes + Seal.size(ticket.table)
        with self._naming_folder("read from"):
            self._wait_for(ticket, path)
            with path.open("rb", buffering=0) as file:
                nbytes = os.fstat(file.fileno()).st_size
                if nbytes != size:
                    raise WeightSyncError(f"{path.name} is truncated: {nbytes:,} of {size:,} bytes")
                bucket = self.settings.bucket
                flat, crcs = self._arena.fill(ticket, bucket, lambda part: _read_exactly(file, part.data))
                return assemble_snapshot(ticket, flat, crcs, Seal.unpack(file.read()))

    def _wait_for(self, ticket: Ticket, path: Path) -> None:
        def check_sender() -> None:
            """Raise WeightSyncError if the sender has begun with this ticket, and no longer sends."""
            try:
                descriptor = os.open(self._sender_path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            try:
                ticket_id, name = _read_sender(descriptor)
                if ticket_id == ticket.id and try_lock(descriptor, fcntl.LOCK_SH) and not path.exists():
                    raise WeightSyncError(f"{ticket}: {name} has ended before it was written")
            finally:
                os.close(descriptor)

        timer = StallTimer(self.settings.timeout_s, lambda: f"{ticket}: {path.name} is not written", check_sender)
        while not path.exists():
            timer.pause()

    def close(self) -> None:
        """Remove the files, on the side that sends."""
        if self._last:
            for path in self._files(_WEIGHTS, _PART, _SENDER):
                path.unlink(missing_ok=True)


def _write_exactly(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _read_exactly(file: io.RawIOBase, target: memoryview) -> None:
    while target:
        count = file.readinto(target)
        if not count:
            raise WeightSyncError(f"a file of weights was truncated at byte {file.tell():,} while it was read")
        target = target[count:]


def _read_sender(descriptor: int) -> tuple[str, str]:
    """Return the last ticket's id, and the name in messages, of the process that has the sender's lock or had it."""
    with suppress(ValueError, KeyError):
        sender = json.loads(os.pread(descriptor, _SENDER_BYTES, 0))
        return sender["ticket"], f"{sender['name']} (process {sender['pid']})"
    return "", "another process"
