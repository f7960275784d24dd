# SPDX-License-Identifier: Apache-2.0
"""Weights that stay in their sender's memory until receivers fetch them, as often as they need.

::

    sender's process                                receivers
      file of version 7    ---- its pages ------>     of the same host: a descriptor, through a socket of the host
      file of version 8    ---- a stream ------->     of other hosts: through TCP
      a thread that listens, one thread per receiver

Neither side waits for the other, so the call that publishes and the call that receives can each be repeated alone, by
another process too. If the sender no longer has a version, receivers raise
:class:`~dlrover.python.rl.common.errors.WeightsLost` and their caller asks for another ticket.
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
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

from dlrover.python.rl.common.errors import WeightsLost, WeightSyncError
from dlrover.python.rl.common.sockets import listening_socket
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.engine.weight_sync.base import (
    Pieces,
    Seal,
    SenderBase,
    StallTimer,
    SyncSettings,
    Ticket,
    WeightSource,
    WeightTable,
    assemble_snapshot,
)
from dlrover.python.rl.engine.weight_sync.buckets import (
    HEAD_BYTES,
    Assembly,
    CrcTally,
    HostArena,
    MappedWeights,
    WeightFile,
    seal_offset,
)

_AVAILABLE, _MISSING = b"+", b"-"
"""The answer to a request for a ticket."""

_GONE = "is not there: it has gone on, or sent nothing"
_ID_BYTES = 32
_RECHECK_S = 0.5
_PAUSE_S = 0.0005
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


class PullTransport(SenderBase):
    """Implements ``WeightTransport``. Any number of receivers, at any time; a version stays until the second after it.

    The sender's ``address`` is required if receivers are on other hosts. With ``maps_pages`` those on its host map its
    pages; else they get a copy through TCP.
    """

    def __init__(self, settings: SyncSettings | None = None, *, maps_pages: bool = True) -> None:
        super().__init__(settings)
        self._maps_pages = maps_pages
        self._versions = PublishedVersions()
        self._server: WeightServer | None = None
        self._arena = HostArena()
        self._mapped_sender = ""
        self._maps: dict[int, mmap.mmap] = {}

    def offer(self, source: WeightSource) -> Ticket:
        ticket = super().offer(source)
        self._versions.expect(ticket.id)
        return ticket

    def _address(self) -> dict[str, Any]:
        if self._server is None:
            self._server = WeightServer(self._versions, self.settings.address, self.settings.timeout_s)
        names = {"local_name": self._server.local_name, "tcp_port": self._server.tcp_port}
        return {**names, "host": self.settings.address}

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        try:
            return super().send(ticket, source)
        finally:
            self._versions.stop_waiting()

    def _write(self, ticket: Ticket, pieces: Pieces) -> WeightStamp:
        return self._versions.write(ticket, pieces).stamp

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """See ``WeightTransport``. Raises ``WeightsLost`` if the sender lacks them, or does not answer."""
        try:
            with self._connect(ticket) as connection:
                connection.sendall(ticket.id.encode("ascii"))
                if connection.family == socket.AF_UNIX:
                    return self._map(ticket, connection)
                return self._copy(ticket, connection)
        except OSError as error:
            raise WeightsLost(f"{ticket} cannot be had: {error}") from error

    def _connect(self, ticket: Ticket) -> socket.socket:
        local = socket.socket(socket.AF_UNIX)
        local.settimeout(self.settings.timeout_s)
        with suppress(OSError):  # the sender is on another host, or has ended
            if self._maps_pages:
                local.connect(b"\0" + str(ticket.address["local_name"]).encode())
                return local
        local.close()
        return socket.create_connection((ticket.address["host"], ticket.address["tcp_port"]), self.settings.timeout_s)

    def _map(self, ticket: Ticket, connection: socket.socket) -> WeightSnapshot:
        _, descriptors, _, _ = socket.recv_fds(connection, len(_AVAILABLE), 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            raise WeightsLost(f"{ticket} {_GONE}")
        if self._mapped_sender != ticket.address["local_name"]:
            self._mapped_sender, self._maps = ticket.address["local_name"], {}
        try:
            _read(connection, len(_AVAILABLE))
            weights = MappedWeights(descriptors[0], ticket.table, self._maps)
        except (WeightSyncError, OSError):
            os.close(descriptors[0])
            raise
        return self._follow(ticket, weights, connection)

    def _follow(self, ticket: Ticket, weights: MappedWeights, connection: socket.socket) -> WeightSnapshot:
        """Fingerprint the pages as the sender writes them, up to the end."""
        tally, end, offset = CrcTally(ticket.table), ticket.table.nbytes, 0
        connection.setblocking(False)

        def describe() -> str:
            return f"{ticket}, {offset:,} of {end:,} bytes"

        def check_sender() -> None:
            if _has_ended(connection) and weights.progress() <= offset:
                raise WeightsLost(f"{describe()}: the sender has ended before it was whole")

        timer = StallTimer(self.settings.timeout_s, describe, check_sender)
        while (progress := weights.progress()) <= end or offset < end:
            stop = min(progress, end, offset + self.settings.bucket)
            if stop > offset:
                tally.update(weights.flat, 0, stop)
                offset = stop
                timer.restart()
            else:
                timer.pause()
        return assemble_snapshot(ticket, weights.flat, tally.crcs, weights.seal())

    def _copy(self, ticket: Ticket, connection: socket.socket) -> WeightSnapshot:
        if _read(connection, len(_AVAILABLE)) != _AVAILABLE:
            raise WeightsLost(f"{ticket} {_GONE}")
        assembly = Assembly(ticket, self._arena)
        for part in assembly.parts(self.settings.bucket):
            _read_into(connection, part.data)
        return assembly.seal(_read(connection, Seal.size(ticket.table)))

    def close(self) -> None:
        self._versions.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._maps.clear()


def _has_ended(connection: socket.socket) -> bool:
    """Return True if the other side of a socket that does not block has closed it, or ended."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)  # waits: not at all, the socket does not block
    except BlockingIOError:
        return False
    except OSError:
        return True


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

    def write(self, ticket: Ticket, pieces: Pieces) -> Seal:
        """Write the ticket's weights, which receivers follow; dropped if that fails."""
        file = self._begin(ticket)
        try:
            return file.write(ticket, pieces)
        except BaseException:
            with self._changed:
                self._files.pop(ticket.id, None)
            raise
        finally:
            self.stop_waiting()

    def _begin(self, ticket: Ticket) -> WeightFile:
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

    def stop_waiting(self) -> None:
        """No receiver waits any longer for a version that is expected or being written."""
        with self._changed:
            self._expected = self._writing = ""
            self._changed.notify_all()

    def open(self, ticket_id: str, timeout_s: float) -> tuple[int, WeightTable] | None:
        """A descriptor of the ticket's file, locked against being overwritten, and its table; None without the file."""
        with self._changed:
            self._changed.wait_for(
                lambda: ticket_id in self._files or ticket_id != self._expected or self._closed, timeout_s
            )
            file = self._files.get(ticket_id)
            descriptor = file.open(fcntl.LOCK_SH) if file is not None else None
            return None if file is None or descriptor is None else (descriptor, file.table)

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
    """Serves ``versions`` to receivers, in a thread that ends with this object."""

    def __init__(self, versions: PublishedVersions, address: str, timeout_s: float) -> None:
        self.local_name = f"dlrover-weights-{uuid4().hex}"  # of the abstract Unix socket for processes of this host
        remote, local = listening_socket(address, _BACKLOG), socket.socket(socket.AF_UNIX)
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
        ticket_id = _read(connection, _ID_BYTES).decode("ascii", "replace")
        opened = versions.open(ticket_id, timeout_s)
        if opened is None:
            connection.sendall(_MISSING)
        elif connection.family == socket.AF_UNIX:
            try:
                socket.send_fds(connection, [_AVAILABLE], [opened[0]])
            finally:
                os.close(opened[0])
            connection.sendall(_AVAILABLE)  # only the receiver holds the lock now
            versions.wait_until_written(ticket_id)
        else:
            connection.sendall(_AVAILABLE)
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
                connection.sendfile(file, HEAD_BYTES + sent, min(progress, end) - sent)
                sent = min(progress, end)
            if progress > end:
                break
            if not is_growing:
                return
            time.sleep(_PAUSE_S)
        seal = os.pread(descriptor, Seal.size(table), seal_offset(table))
    connection.sendall(seal)


def _read(connection: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes; OSError if the other side has ended or is silent for too long."""
    buffer = bytearray(count)
    _read_into(connection, memoryview(buffer))
    return bytes(buffer)


def _read_into(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("the connection has ended")
        target = target[count:]
