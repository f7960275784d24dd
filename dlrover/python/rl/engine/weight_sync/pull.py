# SPDX-License-Identifier: Apache-2.0
"""Weights that stay with their sender until receivers fetch them, as often as they need.

Neither side waits for the other: a version is sent when it is written into the sender's own memory, and receivers fetch
it then or later, on this host by mapping the pages, on another one through TCP. So the call that publishes and the call
that receives can each be repeated alone, by another process too. If the sender no longer has a version, receivers raise
:class:`~dlrover.python.rl.common.errors.WeightsLost` and their caller asks for another ticket.
"""

import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dlrover.python.rl.common.errors import WeightsLost, WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.engine.weight_sync.base import (
    Seal,
    SenderBase,
    StallTimer,
    SyncSettings,
    Ticket,
    WeightSource,
    assemble_snapshot,
    exhaust,
)
from dlrover.python.rl.engine.weight_sync.buckets import CrcTally, HostArena, bucket_spans
from dlrover.python.rl.engine.weight_sync.weight_server import (
    AVAILABLE,
    MappedWeights,
    PublishedVersions,
    WeightServer,
    read,
    read_into,
)


class PullTransport(SenderBase):
    """Implements ``WeightTransport``. Any number of receivers, at any time; a version stays until the second after it.

    Args:
        settings: ``address`` is required on the sender if receivers are on other hosts.
        maps_pages: receivers on the sender's host map its pages; else they get a copy through TCP.
    """

    def __init__(self, settings: SyncSettings | None = None, *, maps_pages: bool = True) -> None:
        super().__init__(settings)
        self._maps_pages = maps_pages
        self._versions = PublishedVersions()
        self._server: WeightServer | None = None
        self._arena = HostArena()
        self._mapped_sender = ""
        self._maps: dict[int, mmap.mmap] = {}

    # -- sending ------------------------------------------------------------------------------------------------------

    def offer(self, source: WeightSource) -> Ticket:
        ticket = super().offer(source)
        self._versions.expect(ticket.id)
        return ticket

    def _address(self) -> dict[str, Any]:
        if self._server is None:
            self._server = WeightServer(self._versions, self.settings.address, self.settings.timeout_s)
        server = self._server
        return {"local_name": server.local_name, "host": self.settings.address, "tcp_port": server.tcp_port}

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        is_complete = False
        stream: Iterator[tuple[int, Any]] = iter(())
        try:
            stream = self._pieces(ticket, source, self.settings.bucket)
            if not self.settings.is_leader:
                return None
            seal = self._versions.begin(ticket).write(ticket, stream)
            is_complete = True
            return seal.stamp
        finally:
            self._versions.end(ticket.id, is_complete)
            exhaust(stream)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """Fetch the weights.

        Raises:
            WeightsLost: the sender does not have them, or not completely, or does not answer.
            WeightSyncError: they are not those that were sent.
        """
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
        _, descriptors, _, _ = socket.recv_fds(connection, len(AVAILABLE), 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            raise self._lost(ticket)
        if self._mapped_sender != ticket.address["local_name"]:
            self._mapped_sender, self._maps = ticket.address["local_name"], {}
        try:
            read(connection, len(AVAILABLE))
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
        if read(connection, len(AVAILABLE)) != AVAILABLE:
            raise self._lost(ticket)
        flat, tally = self._arena.allocate(ticket.table.nbytes), CrcTally(ticket.table)
        for start, stop in bucket_spans(ticket.table, self.settings.bucket):
            read_into(connection, flat[start:stop].data)
            tally.update(flat, 0, stop)
        return assemble_snapshot(ticket, flat, tally.crcs, Seal.unpack(read(connection, Seal.size(ticket.table))))

    def _lost(self, ticket: Ticket) -> WeightsLost:
        return WeightsLost(f"{ticket} is not there: it has gone on, or sent nothing")

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
