"""Weights in a file: of a folder in the node's memory, read while it is written, or of a disk.

::

    folder/
      ACTOR.sender                 locked (flock) by the process that sends; says which, and which ticket
      ACTOR.<ticket id>.weights    one version; readers hold it with a shared lock
      ACTOR.<ticket id>.part       on a disk, until it is whole

Two versions are kept: the last one, which a receiver that was replaced may ask for again, and one whose pages take the
next. What a crash has left is taken for that, or removed, by the next sender of the same name.
"""

import fcntl
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.sync.base import (
    Offers,
    Seal,
    SyncSettings,
    Ticket,
    WeightSource,
    exhaust,
)
from dlrover.python.rl.engine.sync.buckets import Arena
from dlrover.python.rl.engine.sync.image import (
    CopiedReading,
    MappedReading,
    Reading,
    WritableImage,
    follow,
    lock,
    opened,
    told_progress,
    write_pieces,
)
from dlrover.python.rl.engine.sync.waiting import Waiting
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp

_WHOLE, _PART, _SENDER = ".weights", ".part", ".sender"
_SENDER_BYTES = 1024
_LOCK_S = 2.0
_KEPT_VERSIONS = 2


class FileTransport(Offers):
    """Implements :class:`~dlrover.python.rl.engine.sync.base.WeightTransport`. See :func:`shared_memory`, :func:`disk`.

    Args:
        folder: where both sides see the same files; its owner removes it at the end.
        name: of the sender among those who use the folder.
        settings: see there.
        live: whether readers follow the writer; else a file appears when it is whole.
        mapped: whether snapshots are views of the file's pages; else of memory of the receiver.

    Raises:
        ValueError: ``name`` has a dot or a slash in it.
    """

    def __init__(
        self, folder: Path, name: str, settings: SyncSettings | None = None, *, live: bool = True, mapped: bool = True
    ) -> None:
        super().__init__(settings or SyncSettings())
        if not name or {".", "/"} & set(name):
            raise ValueError(f"'{name}' cannot name a sender: it becomes the first part of file names")
        self._folder, self._name, self._live, self._mapped = Path(folder), name, live, mapped
        self._last = ""
        self._images: dict[int, WritableImage] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._arena = Arena()

    def _where(self) -> dict[str, Any]:
        return {"folder": str(self._folder), "name": self._name}

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        """Write the weights into a file; see :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.send`."""
        stream = self._pieces(ticket, source, self.settings.bucket)
        try:
            return self._write(ticket, stream) if self.settings.leads else None
        finally:
            exhaust(stream)

    def _write(self, ticket: Ticket, stream: Iterator[tuple[int, Any]]) -> WeightStamp:
        with self._sending(ticket):
            image = self._fresh(ticket)
            seal = Seal.of(ticket, write_pieces(image, stream))
            image.finish(seal, flush=not self._live)
            if not self._live:
                self._path(ticket.id, _PART).rename(self._path(ticket.id))
            self._last = ticket.id
        return seal.stamp

    def _path(self, ticket_id: str, kind: str = _WHOLE) -> Path:
        return self._folder / f"{self._name}.{ticket_id}{kind}"

    @contextmanager
    def _sending(self, ticket: Ticket) -> Iterator[None]:
        """Be the one who sends; the kernel tells readers when this process is gone."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / f"{self._name}{_SENDER}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            waiting = Waiting(_LOCK_S, lambda: f"{_told(descriptor)} sends already")
            while not lock(descriptor, fcntl.LOCK_EX):  # readers lock it for an instant to see whether anybody does
                waiting.pause()
            told = json.dumps({"who": self.settings.who, "pid": os.getpid(), "ticket": ticket.id})
            os.pwrite(descriptor, told.encode().ljust(_SENDER_BYTES), 0)
            yield
        finally:
            os.close(descriptor)

    def _fresh(self, ticket: Ticket) -> WritableImage:
        """A file for the ticket's weights, under its name: one that nobody needs, or a new one."""
        self._disown(ticket)
        path, descriptor = self._spare()
        try:
            inode = os.fstat(descriptor).st_ino
            image = self._images.pop(inode, None)
            if image is None or image.table != ticket.table:
                image = WritableImage(descriptor, ticket.table, ticket.id)
            image.begin(ticket.id)
            path.rename(self._path(ticket.id, _WHOLE if self._live else _PART))
        finally:
            os.close(descriptor)
        self._images[inode] = image
        while len(self._images) > _KEPT_VERSIONS:
            del self._images[next(iter(self._images))]
        return image

    def _disown(self, ticket: Ticket) -> None:
        """Take the ticket's name from what was sent with it before; who is reading that sees it."""
        for kind in (_WHOLE, _PART):
            with suppress(FileNotFoundError):
                self._path(ticket.id, kind).rename(self._path(uuid4().hex, _PART))

    def _spare(self) -> tuple[Path, int]:
        """A file to write over, open and locked by this process alone; superfluous ones are removed."""
        found = None
        for path in sorted(self._files(_WHOLE, _PART)):
            if self._last and path == self._path(self._last):
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if lock(descriptor, fcntl.LOCK_EX) and found is None:
                found = path, descriptor
                continue
            if lock(descriptor, fcntl.LOCK_EX):
                path.unlink()
            os.close(descriptor)
        if found is None:
            path = self._path(uuid4().hex, _PART)
            found = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return found

    def _files(self, *kinds: str) -> list[Path]:
        """Those of this name."""
        here = self._folder.iterdir() if self._folder.is_dir() else ()
        return [path for path in here if path.name.startswith(f"{self._name}.") and path.suffix in kinds]

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """Read the weights; see :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.receive`."""
        snapshot = None
        while snapshot is None:
            snapshot = self._follow(ticket, self._await(ticket))
        return snapshot

    def _await(self, ticket: Ticket) -> Reading:
        path = self._path(ticket.id)

        def alive() -> None:
            if self._sender_ended(ticket) and not path.exists():
                raise WeightSyncError(self._broken_off(ticket, 0, "before it was there"))

        waiting = Waiting(self.settings.patience_s, lambda: told_progress(ticket, 0), alive)
        while True:
            descriptor = opened(path)
            if descriptor is not None:
                reading = self._reading(path, descriptor, ticket)
                if reading.owner() == ticket.id:
                    return reading
                del reading
            waiting.pause()

    def _reading(self, path: Path, descriptor: int, ticket: Ticket) -> Reading:
        try:
            if self._mapped:
                return MappedReading(path, descriptor, ticket.table, self._maps)
            return CopiedReading(path, descriptor, ticket.table, self._arena)
        except (WeightSyncError, OSError):
            os.close(descriptor)
            raise

    def _follow(self, ticket: Ticket, reading: Reading) -> WeightSnapshot | None:
        """Read up to the end, as the writer goes on; None when another writer has begun anew."""

        def alive(done: int) -> None:
            if self._sender_ended(ticket) and reading.progress() <= done:
                raise WeightSyncError(self._broken_off(ticket, done, "before it was whole"))

        return follow(ticket, reading, self.settings, alive)

    def _sender_ended(self, ticket: Ticket) -> bool:
        """Whether the sender has begun with this ticket, and sends no more."""
        path = self._folder / f"{self._name}{_SENDER}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            begun = ticket.id in _content(descriptor)
            return begun and lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def _broken_off(self, ticket: Ticket, done: int, how: str) -> str:
        with (self._folder / f"{self._name}{_SENDER}").open("rb") as file:
            who = _told(file.fileno())
        return f"{told_progress(ticket, done)}: {who} has ended {how}"

    def close(self) -> None:
        """Remove the files of this name, if this is the side that sends; who reads one keeps it."""
        if self._last:
            for path in self._files(_WHOLE, _PART, _SENDER):
                path.unlink(missing_ok=True)
        self._images.clear()
        self._maps.clear()


def _content(descriptor: int) -> str:
    return os.pread(descriptor, _SENDER_BYTES, 0).decode("utf-8", "replace")


def _told(descriptor: int) -> str:
    with suppress(json.JSONDecodeError, KeyError):
        told = json.loads(_content(descriptor))
        return f"{told['who']} (process {told['pid']})"
    return "another process"


def shared_memory(folder: Path, name: str, settings: SyncSettings | None = None) -> FileTransport:
    """For processes of one node.

    Args:
        folder: in a file system that is kept in memory, for this user only.
        name: of the sender among those who use the folder.
        settings: see there.
    """
    return FileTransport(folder, name, settings)


def disk(folder: Path, name: str, settings: SyncSettings | None = None) -> FileTransport:
    """For processes that see the same folder, which may be another node's.

    Args:
        folder: where.
        name: of the sender among those who use the folder.
        settings: see there.
    """
    return FileTransport(folder, name, settings, live=False, mapped=False)
