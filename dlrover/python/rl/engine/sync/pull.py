"""Weights that stay with their sender, for whoever comes for them, as often as they come.

Nobody waits for anybody: a version is sent when it is written into the sender's own memory, and a receiver fetches it
then or later, from this host by mapping the pages, from another one through TCP. So a call that publishes and a call
that receives can each be repeated alone, by another process too. What the sender has no more is an error of its own,
:class:`~dlrover.python.rl.common.errors.WeightsLost`: whoever has the ticket asks for another one.
"""

import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dlrover.python.rl.common.errors import WeightsLost, WeightSyncError
from dlrover.python.rl.engine.sync.base import (
    Offers,
    Seal,
    SyncSettings,
    Ticket,
    WeightSource,
    assemble,
    exhaust,
)
from dlrover.python.rl.engine.sync.buckets import Arena, Tally, windows
from dlrover.python.rl.engine.sync.image import MappedReading, follow, told_progress, write_pieces
from dlrover.python.rl.engine.sync.shelf import HERE, Counter, Shelf, read, read_into
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp


class PullTransport(Offers):
    """Implements :class:`~dlrover.python.rl.engine.sync.base.WeightTransport`. Any number of sinks, at any time.

    The last version stays until the second after it is sent.

    Args:
        settings: see there.
        address: of the sender's host, as the others reach it; the sender alone needs it.
        maps_pages: whether a receiver of the sender's host uses the sender's pages; else it gets a copy through TCP.
    """

    def __init__(
        self, settings: SyncSettings | None = None, address: str = "127.0.0.1", *, maps_pages: bool = True
    ) -> None:
        super().__init__(settings or SyncSettings())
        self._address, self._maps_pages = address, maps_pages
        self._shelf = Shelf()
        self._counter: Counter | None = None
        self._arena = Arena()
        self._from = ""
        self._maps: dict[int, mmap.mmap] = {}

    # -- sending ------------------------------------------------------------------------------------------------------

    def offer(self, source: WeightSource) -> Ticket:
        """See :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.offer`."""
        ticket = super().offer(source)
        self._shelf.expect(ticket.id)
        return ticket

    def _where(self) -> dict[str, Any]:
        if self._counter is None:
            self._counter = Counter(self._shelf, self._address, self.settings.patience_s)
        return {"near": self._counter.near, "host": self._address, "port": self._counter.port}

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        """Write the weights where they stay; see :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.send`."""
        whole = False
        stream: Iterator[tuple[int, Any]] = iter(())
        try:
            stream = self._pieces(ticket, source, self.settings.bucket)
            if not self.settings.leads:
                return None
            image = self._shelf.begin(ticket)
            seal = Seal.of(ticket, write_pieces(image, stream))
            image.finish(seal)
            whole = True
            return seal.stamp
        finally:
            self._shelf.end(ticket.id, whole)
            exhaust(stream)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """Fetch the weights; see :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.receive`.

        Raises:
            WeightsLost: their sender does not have them, or not whole, or does not answer.
            WeightSyncError: they are not those that were sent.
        """
        told = f"version {ticket.version} from {ticket.sender}"
        try:
            with self._connected(ticket) as connection:
                connection.sendall(ticket.id.encode("ascii"))
                if connection.family == socket.AF_UNIX:
                    return self._map(ticket, connection)
                return self._copy(ticket, connection)
        except OSError as error:
            raise WeightsLost(f"{told} cannot be had: {error}") from error

    def _connected(self, ticket: Ticket) -> socket.socket:
        near = socket.socket(socket.AF_UNIX)
        near.settimeout(self.settings.patience_s)
        with suppress(OSError):  # the sender is on another host, or gone
            if self._maps_pages:
                near.connect(b"\0" + str(ticket.where["near"]).encode())
                return near
        near.close()
        where = ticket.where["host"], ticket.where["port"]
        return socket.create_connection(where, self.settings.patience_s)

    def _map(self, ticket: Ticket, connection: socket.socket) -> WeightSnapshot:
        _, descriptors, _, _ = socket.recv_fds(connection, len(HERE), 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            raise self._gone(ticket)
        if self._from != ticket.where["near"]:
            self._from, self._maps = ticket.where["near"], {}  # another sender: its pages are others
        try:
            read(connection, len(HERE))
            reading = MappedReading(None, descriptors[0], ticket.table, self._maps)
        except (WeightSyncError, OSError):
            os.close(descriptors[0])
            raise

        def alive(done: int) -> None:
            if _has_ended(connection) and reading.progress() <= done:
                raise WeightsLost(f"{told_progress(ticket, done)}: the sender has ended before it was whole")

        snapshot = follow(ticket, reading, self.settings, alive)
        assert snapshot is not None, "nobody takes the name of an image that has none"
        return snapshot

    def _copy(self, ticket: Ticket, connection: socket.socket) -> WeightSnapshot:
        if read(connection, len(HERE)) != HERE:
            raise self._gone(ticket)
        flat, tally = self._arena.take(ticket.table.nbytes), Tally(ticket.table)
        for start, stop in windows(ticket.table, self.settings.bucket):
            read_into(connection, flat[start:stop].data)
            tally.take(flat, 0, stop)
        return assemble(ticket, flat, tally.crcs, Seal.unpacked(read(connection, Seal.size(ticket.table))))

    def _gone(self, ticket: Ticket) -> WeightsLost:
        return WeightsLost(
            f"version {ticket.version} from {ticket.sender} is not there: it has gone on, or sent nothing"
        )

    def close(self) -> None:
        """Hand out no more."""
        self._shelf.close()
        if self._counter is not None:
            self._counter.close()
            self._counter = None
        self._maps.clear()


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it, or is gone."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # waits: not at all
    except BlockingIOError:
        return False
    except OSError:
        return True
