"""What a sender keeps of its weights for whoever comes for them, and the threads that hand it out.

::

    sender's process                                receivers
      image of version 7   ---- its pages ------>     of the same host: a descriptor, through a socket of the host
      image of version 8   ---- a stream ------->     of other hosts: through TCP
      a thread that listens, one for each who comes

The images are memory without a name in any file system: the kernel takes it back when the last process that has it is
gone, however that ended.
"""

import fcntl
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

from dlrover.python.rl.common.listening import listening_socket
from dlrover.python.rl.engine.sync.base import Table, Ticket
from dlrover.python.rl.engine.sync.image import HEAD, WritableImage, lock, progress_at, seal_at

HERE, GONE = b"+", b"-"
"""The answer to who asks for a ticket."""

ID_BYTES = 32
_LOOK_S = 0.5
_PAUSE_S = 0.0005
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


class _Held:
    """An image in memory of its own."""

    def __init__(self, ticket: Ticket) -> None:
        descriptor = os.memfd_create("dlrover-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self.image = WritableImage(descriptor, ticket.table, ticket.id)

    def opened(self, how: int) -> int | None:
        """A descriptor of its own, to read and locked as ``how`` says; None if somebody else's lock forbids it."""
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        if lock(descriptor, how):
            return descriptor
        os.close(descriptor)
        return None

    def is_read(self) -> bool:
        """Whether somebody has it open."""
        descriptor = self.opened(fcntl.LOCK_EX)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None


class Shelf:
    """The images of a sender: the last version, and the one that is being written. Thread safe.

    An image that nobody reads takes the next version: its pages cost more than what is copied into them. Who reads an
    older one keeps it, and it goes with them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[str, _Held] = {}
        self._coming = self._writing = ""
        self._closed = False

    def expect(self, ticket_id: str) -> None:
        """Who asks for this ticket may wait for it."""
        with self._changed:
            self._coming = ticket_id

    def begin(self, ticket: Ticket) -> WritableImage:
        """An image to write the ticket's weights into; the one before the last version, or a new one."""
        with self._changed:
            self._held.pop(ticket.id, None)
            last = next(reversed(self._held), "")
            older = [held for ticket_id, held in self._held.items() if ticket_id != last]
            spare = next((held for held in older if held.image.table == ticket.table and not held.is_read()), None)
            taken = spare or _Held(ticket)
            taken.image.begin(ticket.id)
            kept = {last: self._held[last]} if last else {}
            self._held = {**kept, ticket.id: taken}
            self._writing = ticket.id
            self._changed.notify_all()
            return taken.image

    def end(self, ticket_id: str, whole: bool) -> None:
        """The image is written; not ``whole``: it will never be, and nobody gets it."""
        with self._changed:
            if not whole and ticket_id == self._writing:
                self._held.pop(ticket_id, None)
            self._coming = self._writing = ""
            self._changed.notify_all()

    def opened(self, ticket_id: str, timeout_s: float) -> tuple[int, Table] | None:
        """A descriptor of the ticket's image, whose lock keeps it what it is, and its table; None if it is not there,
        and does not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: ticket_id in self._held or not self._is_coming(ticket_id), timeout_s)
            held = self._held.get(ticket_id)
            descriptor = held.opened(fcntl.LOCK_SH) if held is not None else None
            return None if held is None or descriptor is None else (descriptor, held.image.table)

    def _is_coming(self, ticket_id: str) -> bool:
        return ticket_id == self._coming and not self._closed

    def is_writing(self, ticket_id: str) -> bool:
        """Whether the ticket's image is being written."""
        with self._changed:
            return ticket_id == self._writing and not self._closed

    def await_written(self, ticket_id: str) -> None:
        """Wait until nobody writes the ticket's image any more."""
        with self._changed:
            while ticket_id == self._writing and not self._closed:
                self._changed.wait(_LOOK_S)

    def close(self) -> None:
        """Keep nothing; who reads an image goes on."""
        with self._changed:
            self._closed = True
            self._held.clear()
            self._changed.notify_all()


class Counter:
    """Listens for receivers, in a thread that ends with this object.

    Args:
        shelf: what is handed out.
        address: of this host, as others reach it.
        patience_s: how long a receiver may be silent.

    Attributes:
        near: name of the socket for processes of this host.
        port: of the one for other hosts.
    """

    def __init__(self, shelf: Shelf, address: str, patience_s: float) -> None:
        self.near = f"dlrover-weights-{uuid4().hex}"
        near, far = socket.socket(socket.AF_UNIX), listening_socket(address, _BACKLOG)
        near.bind(b"\0" + self.near.encode())
        near.listen(_BACKLOG)
        self.port = int(far.getsockname()[1])
        bell, self._ring = socket.socketpair()
        self.close: Callable[[], object] = weakref.finalize(self, self._ring.close)
        arguments = (shelf, (near, far), bell, patience_s)
        threading.Thread(target=_listen, args=arguments, name="dlrover-weights", daemon=True).start()


def _listen(shelf: Shelf, listeners: tuple[socket.socket, ...], bell: socket.socket, patience_s: float) -> None:
    with bell, listeners[0], listeners[1], selectors.DefaultSelector() as ready:
        for each in (*listeners, bell):
            each.setblocking(False)
            ready.register(each, selectors.EVENT_READ)
        while True:
            found = [key.fileobj for key, _ in ready.select()]
            if bell in found:
                return
            for listener in (each for each in listeners if each in found):
                _take_in(listener, shelf, patience_s)


def _take_in(listener: socket.socket, shelf: Shelf, patience_s: float) -> None:
    with suppress(OSError):  # gone again
        connection, _ = listener.accept()  # waits: for nobody, the listener does not block
        connection.settimeout(patience_s)
        arguments = (connection, shelf, patience_s)
        threading.Thread(target=_answer, args=arguments, name="dlrover-weights-to", daemon=True).start()


def _answer(connection: socket.socket, shelf: Shelf, patience_s: float) -> None:
    """Serve one receiver. What goes wrong it sees by itself: the connection ends before the weights do."""
    with connection, suppress(OSError):
        if not _is_welcome(connection):
            return
        ticket_id = read(connection, ID_BYTES).decode("ascii", "replace")
        found = shelf.opened(ticket_id, patience_s)
        if found is None:
            connection.sendall(GONE)
        elif connection.family == socket.AF_UNIX:
            try:
                socket.send_fds(connection, [HERE], [found[0]])
            finally:
                os.close(found[0])
            connection.sendall(HERE)  # the lock is the receiver's alone now
            shelf.await_written(ticket_id)
        else:
            connection.sendall(HERE)
            _stream(connection, *found, lambda: shelf.is_writing(ticket_id))


def _is_welcome(connection: socket.socket) -> bool:
    """Of this host only processes of the same user are; from others, whoever knows a ticket."""
    if connection.family != socket.AF_UNIX:
        return True
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1]) == os.getuid()


def _stream(connection: socket.socket, descriptor: int, table: Table, is_writing: Callable[[], bool]) -> None:
    """The tensors' bytes as they are written, then the seal; closes the descriptor before the last of it."""
    sent, end = 0, table.nbytes
    with open(descriptor, "rb", buffering=0) as image:
        while True:
            more = is_writing()
            there = progress_at(descriptor)
            if min(there, end) > sent:
                connection.sendfile(image, HEAD + sent, min(there, end) - sent)
                sent = min(there, end)
            if there > end:
                break
            if not more:
                return
            time.sleep(_PAUSE_S)
        seal = seal_at(descriptor, table)
    connection.sendall(seal)


def read(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        OSError: the other side is gone, or silent for too long.
    """
    buffer = bytearray(count)
    read_into(connection, memoryview(buffer))
    return bytes(buffer)


def read_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``; see :func:`read`."""
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("the connection has ended")
        target = target[count:]
