"""One version of weights in one file, which may be read while it is written.

::

    head      a page: progress u64 (bytes of data that are there; one more than there are: everything is)
              | ticket's id, 32 characters
    data      the tensors, each at a multiple of 64
    ending    the sender's seal, from a multiple of 64

A file that is not needed any more is written over: the pages of a new one cost more than what is copied into them.
"""

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.sync.base import ALIGN, Seal, SyncSettings, Table, Ticket, assemble
from dlrover.python.rl.engine.sync.buckets import Arena, Bytes, Tally, copy_to_host
from dlrover.python.rl.engine.sync.waiting import Waiting
from dlrover.python.rl.engine.weights import WeightSnapshot

HEAD = 4096
_KEPT_MAPS = 3
_ID = slice(8, 40)


def file_size(table: Table) -> int:
    """Length of the file for ``table``."""
    return _ending(table) + Seal.size(table)


def _ending(table: Table) -> int:
    return HEAD + -(-table.nbytes // ALIGN) * ALIGN


def lock(descriptor: int, how: int) -> bool:
    """Lock an open file without waiting; whether that worked."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class WritableImage:
    """A file to write weights into. It can be written over, with :meth:`begin`, as long as the table is the same.

    Args:
        descriptor: the open file, which nobody else has open with a lock; stays the caller's.
        table: what will be in it.
        ticket_id: whose it will be.

    Attributes:
        table: as given.
        data: all of the tensors' bytes, to write to.

    Raises:
        WeightSyncError: there is no room for it.
    """

    def __init__(self, descriptor: int, table: Table, ticket_id: str) -> None:
        size = file_size(table)
        _make_room(descriptor, size)
        self._map = _map(descriptor, size, mmap.ACCESS_WRITE)
        self._progress: npt.NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64, count=1)
        self.table, self._nbytes, self._ending = table, table.nbytes, _ending(table)
        self.begin(ticket_id)
        self.data: Bytes = np.frombuffer(self._map, dtype=np.uint8, count=self._nbytes, offset=HEAD)

    def begin(self, ticket_id: str) -> None:
        """Make it that ticket's, with nothing in it; nobody else may have the file open with a lock."""
        self.show(0)
        self._map[_ID] = ticket_id.encode("ascii")

    def show(self, progress: int) -> None:
        """Let readers have the bytes up to ``progress``."""
        self._progress[0] = progress  # one store of eight bytes: no reader sees half of it

    def finish(self, seal: Seal, flush: bool = False) -> None:
        """Write the seal: the file is whole then. ``flush`` hands it to the disk first."""
        self._map[self._ending :] = seal.packed()
        if flush:
            self._map.flush()
        self.show(self._nbytes + 1)
        if flush:
            self._map.flush(0, HEAD)


def write_pieces(image: WritableImage, stream: Iterator[tuple[int, Any]]) -> list[int]:
    """Copy pieces, offset and bytes, in their order; readers may follow. The fingerprints of the tensors."""
    tally = Tally(image.table)
    for offset, piece in stream:
        stop = offset + len(piece)
        copy_to_host(image.data[offset:stop], piece)
        tally.take(image.data, 0, stop)
        image.show(stop)
    return tally.crcs


def progress_at(descriptor: int) -> int:
    """How far the image in an open file is written."""
    return int.from_bytes(os.pread(descriptor, 8, 0), "little")


def seal_at(descriptor: int, table: Table) -> bytes:
    """The seal in a file that is whole, as it stands there."""
    return os.pread(descriptor, Seal.size(table), _ending(table))


def _make_room(descriptor: int, size: int) -> None:
    found = os.fstat(descriptor)
    try:
        if found.st_size != size:
            os.ftruncate(descriptor, size)
        if found.st_blocks * 512 < size:
            os.posix_fallocate(descriptor, 0, size)  # or a store into the mapped file is the process's end
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        disk = os.fstatvfs(descriptor)
        free = disk.f_bavail * disk.f_frsize
        raise WeightSyncError(f"no room for weights: {size:,} bytes are needed, {free:,} are free") from error


class Reading(Protocol):
    """A file that is being read; nobody writes over it as long as ``flat`` or a part of it lives.

    Attributes:
        flat: where the tensors' bytes are, as far as they have been fetched.
    """

    flat: Bytes

    def owner(self) -> str:
        """Id of the ticket whose file it is."""
        ...

    def progress(self) -> int:
        """How far it is written; a WeightSyncError if it has been cut."""
        ...

    def fetch(self, start: int, stop: int) -> None:
        """Bring these bytes, which are written, to ``flat``."""
        ...

    def seal(self) -> Seal:
        """The sender's, once everything is written."""
        ...

    def replaced(self) -> bool:
        """Whether another file has its name."""
        ...


class _OpenFile:
    def __init__(self, path: Path | None, descriptor: int, table: Table) -> None:
        self._path, self._descriptor, self._size, self._end = path, descriptor, file_size(table), _ending(table)
        self._check_length()

    def _check_length(self) -> None:
        found = os.fstat(self._descriptor).st_size
        if found != self._size:
            raise WeightSyncError(f"{self._path or 'an image'} is cut: {found:,} of {self._size:,} bytes")

    def replaced(self) -> bool:
        if self._path is None:
            return False
        try:
            return self._path.stat().st_ino != os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False


class CopiedReading(_OpenFile):
    """Reads a file into memory of this process."""

    def __init__(self, path: Path, descriptor: int, table: Table, arena: Arena) -> None:
        super().__init__(path, descriptor, table)
        self.flat = arena.take(table.nbytes)
        weakref.finalize(self, os.close, descriptor)

    def owner(self) -> str:
        return os.pread(self._descriptor, 32, _ID.start).decode("ascii", "replace")

    def progress(self) -> int:
        return progress_at(self._descriptor)

    def fetch(self, start: int, stop: int) -> None:
        while start < stop:
            count = os.preadv(self._descriptor, [self.flat[start:stop].data], HEAD + start)
            if not count:
                self._check_length()
            start += count

    def seal(self) -> Seal:
        self._check_length()
        return Seal.unpacked(os.pread(self._descriptor, self._size - self._end, self._end))


class MappedReading(_OpenFile):
    """Uses the file's own pages, which all readers of a node share.

    Args:
        path: of the file, None where it has no name.
        descriptor: the open file, with a shared lock; closed when the last view of ``flat`` is gone.
        table: what is in it.
        maps: mappings of files seen before, by inode: a new one costs as much as a copy.
    """

    def __init__(self, path: Path | None, descriptor: int, table: Table, maps: dict[int, mmap.mmap]) -> None:
        super().__init__(path, descriptor, table)
        self._map = self._known_map(maps)
        self._progress: npt.NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64, count=1)
        self.flat: Bytes = np.frombuffer(self._map, dtype=np.uint8, count=table.nbytes, offset=HEAD)
        weakref.finalize(self.flat, os.close, descriptor)

    def _known_map(self, maps: dict[int, mmap.mmap]) -> mmap.mmap:
        inode = os.fstat(self._descriptor).st_ino
        known = maps.pop(inode, None)
        if known is None or len(known) != self._size:
            known = _map(self._descriptor, self._size, mmap.ACCESS_READ)
        maps[inode] = known
        while len(maps) > _KEPT_MAPS:
            del maps[next(iter(maps))]
        return known

    def owner(self) -> str:
        return self._map[_ID].decode("ascii", "replace")

    def progress(self) -> int:
        self._check_length()  # a page that is gone would be the process's end
        return int(self._progress[0])

    def fetch(self, start: int, stop: int) -> None:
        """They are there."""

    def seal(self) -> Seal:
        return Seal.unpacked(self._map[self._end :])


def _map(descriptor: int, size: int, access: int) -> mmap.mmap:
    how = os.O_RDONLY if access == mmap.ACCESS_READ else os.O_RDWR
    own = os.open(f"/proc/self/fd/{descriptor}", how | os.O_CLOEXEC)  # a mapping would keep its descriptor's lock
    try:
        return mmap.mmap(own, size, access=access)
    finally:
        os.close(own)


def opened(path: Path) -> int | None:
    """A descriptor of the file at ``path`` with a shared lock; None if there is none, or its writer prepares it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if lock(descriptor, fcntl.LOCK_SH):
        return descriptor
    os.close(descriptor)
    return None


def told_progress(ticket: Ticket, done: int) -> str:
    """What messages say of a sync that is under way."""
    return f"version {ticket.version} from {ticket.sender}, {done:,} of {ticket.table.nbytes:,} bytes"


def follow(
    ticket: Ticket, reading: Reading, settings: SyncSettings, alive: Callable[[int], None]
) -> WeightSnapshot | None:
    """Read an image up to its end, as the writer goes on.

    Args:
        ticket: whose it is.
        reading: the image.
        settings: of the reader.
        alive: called now and then while nothing moves, with how far the reader is; raises when nothing will come.

    Returns:
        All of it, compared with the sender's fingerprints; None when another writer has begun anew.

    Raises:
        WeightSyncError: it is not what was sent, or nothing has moved for too long; and what ``alive`` raises.
    """
    tally, end, done = Tally(ticket.table), ticket.table.nbytes, 0
    waiting = Waiting(settings.patience_s, lambda: told_progress(ticket, done), lambda: alive(done))
    while (there := reading.progress()) <= end or done < end:
        stop = min(there, end, done + settings.bucket)
        if stop > done:
            reading.fetch(done, stop)
            tally.take(reading.flat, 0, stop)
            done = stop
            waiting.moved()
        elif reading.replaced():
            return None
        else:
            waiting.pause()
    return assemble(ticket, reading.flat, tally.crcs, reading.seal())
