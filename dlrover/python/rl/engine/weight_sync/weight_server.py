# SPDX-License-Identifier: Apache-2.0
"""Versions of weights in a process's memory, and the threads that send them to other processes: to processes of the
same host a descriptor of the memory, through a Unix socket, to others a stream."""

import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Generic, TypeVar

from dlrover.python.rl.common.errors import WeightsLost
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.engine.weight_sync.base import Seal, SenderBase, Ticket, WeightSource, WeightTable
from dlrover.python.rl.engine.weight_sync.buckets import HEAD_BYTES, DeviceBuffer, WeightFile, seal_offset

AVAILABLE, MISSING = b"+", b"-"
"""The answer to a request for a ticket."""

GONE = "is not there: the sender has a later version, or sent nothing"

ID_BYTES = 32
_PAUSE_S = 0.0005
_RECHECK_S = 0.5
_CREDENTIALS = struct.Struct("3i")

BACKLOG = 1024

M = TypeVar("M", bound=WeightFile | DeviceBuffer)
T = TypeVar("T")


class PublishedVersions(Generic[M]):
    """A process's last version, and the one before it or the one being written. Thread safe. Memory that no receiver
    has open is reused, which is faster than new memory."""

    def __init__(self, allocate: Callable[[WeightTable], M]) -> None:
        self._allocate = allocate
        self._changed = threading.Condition()
        self._files: dict[str, M] = {}  # by the tickets' ids
        self._spare: M | None = None
        self._expected = self._writing = ""
        self._closed = False

    def expect(self, ticket_id: str) -> None:
        """Let receivers wait until this ticket's version is written."""
        with self._changed:
            self._expected = ticket_id

    def prepare(self, table: WeightTable) -> M:
        """Allocate the memory for the next version before a receiver waits for it."""
        with self._changed:
            self._spare = self._find_unused(table, list(self._files)[:-1]) or self._allocate(table)
            return self._spare

    @contextmanager
    def writing(self, ticket: Ticket) -> Iterator[M]:
        """Replace the version before the last by memory for the ticket's weights, which receivers may follow while the
        block writes them; a version that fails is dropped."""
        with self._changed:
            replaced = [*[ticket_id for ticket_id in self._files if ticket_id != ticket.id][:-1], ticket.id]
            memory = self._find_unused(ticket.table, replaced)
            self._spare = None  # freed like the replaced versions, before more is allocated
            for ticket_id in replaced:
                self._files.pop(ticket_id, None)
            memory = memory or self._allocate(ticket.table)
            memory.clear()
            self._files[ticket.id], self._writing = memory, ticket.id
            self._changed.notify_all()
        try:
            yield memory
        except BaseException:
            with self._changed:
                self._spare = self._files.pop(ticket.id, None)
            raise
        finally:
            self.stop_waiting()

    def _find_unused(self, table: WeightTable, ticket_ids: Sequence[str]) -> M | None:
        """Return the spare memory, or one of these tickets', if it fits and no receiver reads it."""
        free = [self._spare, *map(self._files.get, ticket_ids)]
        return next((each for each in free if each is not None and each.table == table and not each.is_open()), None)

    def stop_waiting(self) -> None:
        """Wake the receivers that wait for a version, whether it has been written or not."""
        with self._changed:
            self._expected = self._writing = ""
            self._changed.notify_all()

    def open(self, ticket_id: str, timeout_s: float, lend: Callable[[M], T | None], whole: bool = False) -> T | None:
        """Lend the ticket's memory, which no version overwrites then, or return None if it is not there. With ``whole``
        wait until it is written."""

        def is_there() -> bool:
            return ticket_id in self._files and not (whole and ticket_id == self._writing)

        with self._changed:
            self._changed.wait_for(lambda: is_there() or ticket_id != self._expected or self._closed, timeout_s)
            return lend(self._files[ticket_id]) if is_there() else None

    def is_writing(self, ticket_id: str) -> bool:
        with self._changed:
            return ticket_id == self._writing and not self._closed

    def wait_until_written(self, ticket_id: str) -> None:
        with self._changed:
            while ticket_id == self._writing and not self._closed:
                self._changed.wait(_RECHECK_S)

    def close(self) -> None:
        """Drop all versions, which receivers may still have open."""
        with self._changed:
            self._closed = True
            self._files.clear()
            self._spare = None
            self._changed.notify_all()


class KeepingSender(SenderBase, Generic[M]):
    """Keeps the last versions that it sent in its memory, for receivers that come at any time."""

    sends_adapters_alone = True
    _versions: PublishedVersions[M]
    _stop_server: Callable[[], object] | None = None

    def offer(self, source: WeightSource) -> Ticket:
        ticket = super().offer(source)
        self._versions.expect(ticket.id)
        return ticket

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        self._versions.expect(ticket.id)
        try:
            return super().send(ticket, source)
        finally:
            self._versions.stop_waiting()

    def close(self) -> None:
        self._versions.close()
        if self._stop_server is not None:
            self._stop_server()
            self._stop_server = None

    def _start_server(self, serve: Callable[[socket.socket], None], *listeners: socket.socket) -> Callable[[], object]:
        """Call ``serve`` in a thread for each receiver that connects to ``listeners``, until the returned function is
        called or this object, to which ``serve`` must not refer, is garbage."""
        stop, own_end = socket.socketpair()
        arguments = (serve, listeners, stop, self.settings.timeout_s)
        threading.Thread(target=_listen, args=arguments, name="dlrover-weights", daemon=True).start()
        return weakref.finalize(self, own_end.close)


def listen_on_host(name: str) -> socket.socket:
    """Return a socket that processes of this host find by its name. Raises OSError if another process has the name."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(b"\0" + name.encode())
    except OSError:
        listener.close()
        raise
    listener.listen(BACKLOG)
    return listener


def connect_on_host(name: str, timeout_s: float) -> socket.socket | None:
    """Connect to the process of this host that listens at a name; None if there is none. Raises OSError for another
    user's process."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(b"\0" + name.encode())
    except OSError:
        connection.close()
        return None
    if peer_credentials(connection)[1] != os.getuid():
        connection.close()
        raise PermissionError("another user's process listens at its name")
    return connection


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user of the other end, on this host."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return int(process), int(user)


def _listen(
    serve: Callable[[socket.socket], None], listeners: Sequence[socket.socket], stop: socket.socket, timeout_s: float
) -> None:
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for each in (*listeners, stop):
            stack.enter_context(each)
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if stop in ready:
                return
            for listener in (each for each in listeners if each in ready):
                _accept(listener, serve, timeout_s)


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None], timeout_s: float) -> None:
    with suppress(OSError):  # the receiver has ended
        connection, _ = listener.accept()  # waits: not at all, the listener does not block
        connection.settimeout(timeout_s)
        threading.Thread(target=_serve, args=(connection, serve), name="dlrover-weights-to", daemon=True).start()


def _serve(connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Serve one receiver: a process of the same user on this host, or one of another host that knows a ticket. After a
    failure the connection ends before all weights have come, which the receiver notices."""
    with connection, suppress(OSError):
        if connection.family != socket.AF_UNIX or peer_credentials(connection)[1] == os.getuid():
            serve(connection)


def serve_version(connection: socket.socket, versions: PublishedVersions[WeightFile], timeout_s: float) -> None:
    """Send the version of the ticket that the receiver names, by its descriptor or as a stream."""
    ticket_id = read_exactly(connection, ID_BYTES).decode("ascii", "replace")
    opened = versions.open(ticket_id, timeout_s, WeightFile.lend)
    if opened is None:
        connection.sendall(MISSING)
    elif connection.family == socket.AF_UNIX:
        try:
            socket.send_fds(connection, [AVAILABLE], [opened[0]])
        finally:
            os.close(opened[0])
        connection.sendall(AVAILABLE)  # now only the receiver holds the lock
        versions.wait_until_written(ticket_id)
    else:
        connection.sendall(AVAILABLE)
        _stream(connection, *opened, lambda: versions.is_writing(ticket_id))


def _stream(connection: socket.socket, descriptor: int, table: WeightTable, is_writing: Callable[[], bool]) -> None:
    """Send the data as it is written, close the descriptor, and send the seal."""
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


def request(connection: socket.socket, ticket: Ticket) -> None:
    """Request the ticket's version. Raises WeightsLost if it is not there."""
    connection.sendall(ticket.id.encode("ascii"))
    if read_exactly(connection, len(AVAILABLE)) != AVAILABLE:
        raise WeightsLost(f"{ticket} {GONE}")


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes. Raises OSError if the other side has ended or is silent for too long."""
    buffer = bytearray(count)
    read_into(connection, memoryview(buffer))
    return bytes(buffer)


def read_into(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("the connection has ended")
        target = target[count:]
