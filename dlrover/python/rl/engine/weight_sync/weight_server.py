# SPDX-License-Identifier: Apache-2.0
"""A sender's versions in memory, and the threads that serve them.

::

    sender's process                                receivers
      file of version 7    ---- its pages ------>     of the same host: a descriptor, through a socket of the host
      file of version 8    ---- a stream ------->     of other hosts: through TCP
      a thread that listens, one thread per receiver

A file is memory without a name in any file system: the kernel frees it when the last process that has it open ends. It
has three parts, and may be read while it is written::

    head      a page: progress u64 (bytes of data that are written; one more than all of them: complete)
    data      the tensors, each at a multiple of 64
    seal      the sender's, from a multiple of 64
"""

import fcntl
import mmap
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.common.sockets import listening_socket
from dlrover.python.rl.engine.weight_sync.base import ALIGN, Seal, Ticket, WeightTable
from dlrover.python.rl.engine.weight_sync.buckets import Bytes, CrcTally, copy_to_host, reserve, try_lock

AVAILABLE, MISSING = b"+", b"-"
"""The answer to a request for a ticket."""

_HEAD = 4096
_CACHED_MAPS = 3
_ID_BYTES = 32
_RECHECK_S = 0.5
_PAUSE_S = 0.0005
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


def _seal_offset(table: WeightTable) -> int:
    return _HEAD + -(-table.nbytes // ALIGN) * ALIGN


def _file_size(table: WeightTable) -> int:
    return _seal_offset(table) + Seal.size(table)


class WeightFile:
    """A version in memory, which can be overwritten by another one with the same table."""

    def __init__(self, table: WeightTable) -> None:
        self._descriptor = os.memfd_create("dlrover-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        size = _file_size(table)
        reserve(self._descriptor, size)
        self._map = _map(self._descriptor, size, mmap.ACCESS_WRITE)
        self._progress: npt.NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64, count=1)
        self.table, self._nbytes = table, table.nbytes
        self._data: Bytes = np.frombuffer(self._map, dtype=np.uint8, count=self._nbytes, offset=_HEAD)
        self._publish(0)

    def _publish(self, progress: int) -> None:
        self._progress[0] = progress  # one store of eight bytes: no reader sees half of it

    def write(self, ticket: Ticket, stream: Iterator[tuple[int, Any]]) -> Seal:
        """Copy pieces, offset and bytes, in order, and seal them; readers may follow."""
        tally = CrcTally(self.table)
        for offset, piece in stream:
            stop = offset + len(piece)
            copy_to_host(self._data[offset:stop], piece)
            tally.update(self._data, 0, stop)
            self._publish(stop)
        seal = Seal.of(ticket, tally.crcs)
        self._map[_seal_offset(self.table) :] = seal.pack()
        self._publish(self._nbytes + 1)
        return seal

    def clear(self) -> None:
        self._publish(0)

    def open(self, lock: int) -> int | None:
        """Another descriptor of the file, for reading and with a lock; None if a lock of another descriptor forbids
        it."""
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        if try_lock(descriptor, lock):
            return descriptor
        os.close(descriptor)
        return None

    def is_open(self) -> bool:
        """Return True if a receiver has it open."""
        descriptor = self.open(fcntl.LOCK_EX)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None


class MappedWeights:
    """A receiver's view of a sender's pages, which no version overwrites as long as a view of ``flat`` lives.

    Args:
        descriptor: the open file, with a shared lock; closed with the last view of ``flat``.
        table: the tensors.
        maps: mappings of earlier files by inode, since a new one costs as much as a copy.
    """

    def __init__(self, descriptor: int, table: WeightTable, maps: dict[int, mmap.mmap]) -> None:
        self._descriptor, self._size, self._seal_offset = descriptor, _file_size(table), _seal_offset(table)
        self._check_length()
        self._map = self._find_map(maps)
        self._progress: npt.NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64, count=1)
        self.flat: Bytes = np.frombuffer(self._map, dtype=np.uint8, count=table.nbytes, offset=_HEAD)
        weakref.finalize(self.flat, os.close, descriptor)

    def _check_length(self) -> None:
        nbytes = os.fstat(self._descriptor).st_size
        if nbytes != self._size:
            raise WeightSyncError(f"a sender's file is cut: {nbytes:,} of {self._size:,} bytes")

    def _find_map(self, maps: dict[int, mmap.mmap]) -> mmap.mmap:
        inode = os.fstat(self._descriptor).st_ino
        mapping = maps.pop(inode, None)
        if mapping is None or len(mapping) != self._size:
            mapping = _map(self._descriptor, self._size, mmap.ACCESS_READ)
        maps[inode] = mapping
        while len(maps) > _CACHED_MAPS:
            del maps[next(iter(maps))]
        return mapping

    def progress(self) -> int:
        self._check_length()  # reading a page that is cut off would end this process
        return int(self._progress[0])

    def seal(self) -> Seal:
        return Seal.unpack(self._map[self._seal_offset :])


def _map(descriptor: int, size: int, access: int) -> mmap.mmap:
    flags = os.O_RDONLY if access == mmap.ACCESS_READ else os.O_RDWR
    # Its own open file: the mapping keeps it, and would keep a lock of the given one.
    reopened = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
    try:
        return mmap.mmap(reopened, size, access=access)
    finally:
        os.close(reopened)


class PublishedVersions:
    """A sender's last version, and the one that is being written. Thread safe.

    A file that no receiver has open takes the next version: its pages cost more than copying into them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._files: dict[str, WeightFile] = {}
        self._expected = self._writing = ""
        self._closed = False

    def expect(self, ticket_id: str) -> None:
        """Let receivers of this ticket wait until it is written."""
        with self._changed:
            self._expected = ticket_id

    def begin(self, ticket: Ticket) -> WeightFile:
        """A file for the ticket's weights: the one before the last version, or a new one."""
        with self._changed:
            self._files.pop(ticket.id, None)
            last = next(reversed(self._files), "")
            older = [file for ticket_id, file in self._files.items() if ticket_id != last]
            spare = next((file for file in older if file.table == ticket.table and not file.is_open()), None)
            file = spare or WeightFile(ticket.table)
            file.clear()
            self._files = {last: self._files[last]} if last else {}
            self._files[ticket.id] = file
            self._writing = ticket.id
            self._changed.notify_all()
            return file

    def end(self, ticket_id: str, is_complete: bool) -> None:
        """End writing; an incomplete file is dropped."""
        with self._changed:
            if not is_complete and ticket_id == self._writing:
                self._files.pop(ticket_id, None)
            self._expected = self._writing = ""
            self._changed.notify_all()

    def open(self, ticket_id: str, timeout_s: float) -> tuple[int, WeightTable] | None:
        """A descriptor of the ticket's file, whose lock keeps it from being overwritten, and its table; None if it
        does not exist within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: ticket_id in self._files or not self._is_expected(ticket_id), timeout_s)
            file = self._files.get(ticket_id)
            descriptor = file.open(fcntl.LOCK_SH) if file is not None else None
            return None if file is None or descriptor is None else (descriptor, file.table)

    def _is_expected(self, ticket_id: str) -> bool:
        return ticket_id == self._expected and not self._closed

    def is_writing(self, ticket_id: str) -> bool:
        with self._changed:
            return ticket_id == self._writing and not self._closed

    def wait_until_written(self, ticket_id: str) -> None:
        with self._changed:
            while ticket_id == self._writing and not self._closed:
                self._changed.wait(_RECHECK_S)

    def close(self) -> None:
        """Drop all files; receivers that have one open are not affected."""
        with self._changed:
            self._closed = True
            self._files.clear()
            self._changed.notify_all()


class WeightServer:
    """Serves ``versions`` to receivers, in a thread that ends with this object.

    Attributes:
        local_name: of the abstract Unix socket for processes of this host.
        tcp_port: for other hosts.
    """

    def __init__(self, versions: PublishedVersions, address: str, timeout_s: float) -> None:
        self.local_name = f"dlrover-weights-{uuid4().hex}"
        local, remote = socket.socket(socket.AF_UNIX), listening_socket(address, _BACKLOG)
        local.bind(b"\0" + self.local_name.encode())
        local.listen(_BACKLOG)
        self.tcp_port = int(remote.getsockname()[1])
        stop, self._stop = socket.socketpair()
        self.close: Callable[[], object] = weakref.finalize(self, self._stop.close)
        arguments = (versions, (local, remote), stop, timeout_s)
        threading.Thread(target=_listen, args=arguments, name="dlrover-weights", daemon=True).start()


def _listen(
    versions: PublishedVersions, listeners: tuple[socket.socket, ...], stop: socket.socket, timeout_s: float
) -> None:
    with stop, listeners[0], listeners[1], selectors.DefaultSelector() as selector:
        for each in (*listeners, stop):
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if stop in ready:
                return
            for listener in (each for each in listeners if each in ready):
                _accept(listener, versions, timeout_s)


def _accept(listener: socket.socket, versions: PublishedVersions, timeout_s: float) -> None:
    with suppress(OSError):  # the receiver has ended
        connection, _ = listener.accept()  # waits: not at all, the listener does not block
        connection.settimeout(timeout_s)
        arguments = (connection, versions, timeout_s)
        threading.Thread(target=_serve, args=arguments, name="dlrover-weights-to", daemon=True).start()


def _serve(connection: socket.socket, versions: PublishedVersions, timeout_s: float) -> None:
    """Serve one receiver, which sees a failure by itself: the connection ends before the weights do."""
    with connection, suppress(OSError):
        if not _is_allowed(connection):
            return
        ticket_id = read(connection, _ID_BYTES).decode("ascii", "replace")
        opened = versions.open(ticket_id, timeout_s)
        if opened is None:
            connection.sendall(MISSING)
        elif connection.family == socket.AF_UNIX:
            try:
                socket.send_fds(connection, [AVAILABLE], [opened[0]])
            finally:
                os.close(opened[0])
            connection.sendall(AVAILABLE)  # only the receiver holds the lock now
            versions.wait_until_written(ticket_id)
        else:
            connection.sendall(AVAILABLE)
            _stream(connection, *opened, lambda: versions.is_writing(ticket_id))


def _is_allowed(connection: socket.socket) -> bool:
    """On this host only processes of the same user are allowed; from others, every process that knows a ticket."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.getuid()


def _stream(connection: socket.socket, descriptor: int, table: WeightTable, is_writing: Callable[[], bool]) -> None:
    """Send the data as it is written, then the seal; closes the descriptor before the last bytes of it."""
    sent, end = 0, table.nbytes
    with open(descriptor, "rb", buffering=0) as file:
        while True:
            is_growing = is_writing()
            progress = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if min(progress, end) > sent:
                connection.sendfile(file, _HEAD + sent, min(progress, end) - sent)
                sent = min(progress, end)
            if progress > end:
                break
            if not is_growing:
                return
            time.sleep(_PAUSE_S)
        seal = os.pread(descriptor, Seal.size(table), _seal_offset(table))
    connection.sendall(seal)


def read(connection: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes; OSError if the other side has ended or is silent for too long."""
    buffer = bytearray(count)
    read_into(connection, memoryview(buffer))
    return bytes(buffer)


def read_into(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("the connection has ended")
        target = target[count:]
