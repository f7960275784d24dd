# SPDX-License-Identifier: Apache-2.0
"""Weights that stay in their sender's memory, from which receivers fetch them.

::

    sender's process                                receivers
      file of version 7    ---- its pages ------>     of the same host: a descriptor, through a socket of the host
      file of version 8    ---- a stream ------->     of other hosts: through TCP
      a thread that listens, one thread per receiver

    one receiver of another host reads the stream into such a file, and shares its pages with the other receivers there

Neither side waits for the other, so publishing and receiving can each be repeated alone, by another process too. If the
sender no longer has a version, receivers raise :class:`~dlrover.python.rl.common.errors.WeightsLost` and their caller
requests another ticket.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import torch

from dlrover.python.rl.common.errors import WeightsLost, WeightSyncError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.common.sockets import listening_socket
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.engine.memory.offload import HostPages
from dlrover.python.rl.engine.weight_sync import weight_server
from dlrover.python.rl.engine.weight_sync.base import (
    HOST_BUCKET,
    Pieces,
    Seal,
    StallTimer,
    SyncSettings,
    Ticket,
    WeightSource,
)
from dlrover.python.rl.engine.weight_sync.buckets import Bytes, CrcTally, MappedWeights, WeightFile
from dlrover.python.rl.engine.weight_sync.weight_server import KeepingSender, PublishedVersions

_LOG = get_logger(__name__)

_TURN_S, _PATIENCE_S, _PAUSE_S = 0.2, 1.0, 0.01
"""Time for which the receivers of a host wait for the one that shared its pages before, time after which each fetches
the weights itself, and pause between attempts."""


class PullTransport(KeepingSender[WeightFile]):
    """Implements ``WeightTransport`` for any number of receivers, at any time. A version stays until the second after
    it. Receivers on other hosts need the sender's ``address``. With ``maps_pages`` the receivers of a host map one
    copy, else each gets a copy through TCP."""

    def __init__(self, settings: SyncSettings | None = None, *, maps_pages: bool = True) -> None:
        super().__init__(settings)
        self._maps_pages = maps_pages
        self._versions, self._fetched = PublishedVersions(WeightFile), PublishedVersions(WeightFile)
        self._names: dict[str, Any] = {}
        self._stop_relay: Callable[[], object] | None = None  # while this process shares the pages that it has fetched
        self._mapped_process = 0
        self._maps: dict[int, HostPages] = {}

    def offer(self, source: WeightSource) -> Ticket:
        ticket = super().offer(source)
        if self.settings.is_leader:
            with suppress(WeightSyncError, OSError):  # send() raises it after this rank has taken part in gathering
                file = self._versions.prepare(ticket.table)
                file.reserve()
                file.pages.lock(torch.device(self.settings.device))
        return ticket

    def _address(self) -> dict[str, Any]:
        host = self.settings.address
        if self._stop_server is None:
            name = f"dlrover-weights-{uuid4().hex}"
            remote, local = listening_socket(host, weight_server.BACKLOG), weight_server.listen_on_host(name)
            serve = partial(weight_server.serve_version, versions=self._versions, timeout_s=self.settings.timeout_s)
            self._stop_server = self._start_server(serve, local, remote)
            self._names = {"local_name": name, "tcp_port": int(remote.getsockname()[1])}
        return {**self._names, "host": host}

    def _write(self, ticket: Ticket, pieces: Pieces) -> WeightStamp:
        with self._versions.writing(ticket) as file:
            return file.write(ticket, pieces).stamp

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """Raise WeightsLost if the sender lacks the weights, or does not answer; else see ``WeightTransport``."""
        ticket.check_whole()
        try:
            if not self._maps_pages:
                return self._fetch(ticket)
            local = weight_server.connect_on_host(ticket.address["local_name"], self.settings.timeout_s)
            if local is None:
                return self._receive_from_afar(ticket)
            self._drop_fetched()  # if the sender was on another host before
            return self._map(ticket, local)
        except OSError as error:
            raise WeightsLost(f"{ticket} cannot be fetched: {error}") from error

    def _map(self, ticket: Ticket, connection: socket.socket) -> WeightSnapshot:
        """Map the pages of the process at the other end, which has the ticket's weights or receives them."""
        with connection:
            connection.sendall(ticket.id.encode("ascii"))
            _, descriptors, _, _ = socket.recv_fds(connection, len(weight_server.AVAILABLE), 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise WeightsLost(f"{ticket} {weight_server.GONE}")
            self._use_maps_of(weight_server.peer_credentials(connection)[0])
            try:
                weight_server.read_exactly(connection, len(weight_server.AVAILABLE))
                weights = MappedWeights(descriptors[0], ticket.table, self._maps)
            except (WeightSyncError, OSError):
                os.close(descriptors[0])
                raise
            return self._follow(ticket, weights, connection)

    def _use_maps_of(self, process: int) -> None:
        """Drop the mappings of another process's memory."""
        if self._mapped_process != process:
            self._mapped_process, self._maps = process, {}

    def _follow(self, ticket: Ticket, weights: MappedWeights, connection: socket.socket) -> WeightSnapshot:
        """Fingerprint the pages while the sender writes them, up to the end."""
        tally, end, offset = CrcTally(ticket.table), ticket.table.nbytes, 0
        connection.setblocking(False)

        def describe() -> str:
            return f"{ticket}, {offset:,} of {end:,} bytes"

        def check_sender() -> None:
            if _has_ended(connection) and weights.progress() <= offset:
                raise WeightsLost(f"{describe()}: the sender has ended before it was complete")

        timer = StallTimer(self.settings.timeout_s, describe, check_sender)
        while (progress := weights.progress()) <= end or offset < end:
            stop = min(progress, end, offset + self.settings.bucket)
            if stop > offset:
                tally.update(weights.flat, 0, stop)
                offset = stop
                timer.restart()
            else:
                timer.pause()
        return weights.snapshot(ticket, tally.crcs)

    def _receive_from_afar(self, ticket: Ticket) -> WeightSnapshot:
        """Map the pages that another receiver of this host fetches; if there is none, fetch the weights for all."""
        name, began_s = f"dlrover-weights-of-{ticket.id}", time.monotonic()
        while True:
            if (weights := self._follow_another(ticket, name)) is not None:
                return weights
            waited_s, listener = time.monotonic() - began_s, None
            if self._stop_relay is not None or waited_s > _TURN_S:
                with suppress(OSError):  # another receiver was faster, or the kernel has not freed the name yet
                    listener = weight_server.listen_on_host(name)
            if listener is not None or waited_s > _PATIENCE_S:
                return self._fetch(ticket, listener)
            time.sleep(_PAUSE_S)

    def _follow_another(self, ticket: Ticket, name: str) -> WeightSnapshot | None:
        """Return None if no process of this host shares its pages, or it fails before they are complete."""
        try:
            if (relay := weight_server.connect_on_host(name, self.settings.timeout_s)) is None:
                return None
            weights = self._map(ticket, relay)
        except (WeightSyncError, OSError) as error:  # it has ended, is stopped, or has other bytes
            _LOG.warning("%s: the process that shares its pages has failed, trying without it: %s", ticket, error)
            return None
        if self._mapped_process != os.getpid():
            self._drop_fetched()
        return weights

    def _fetch(self, ticket: Ticket, listener: socket.socket | None = None) -> WeightSnapshot:
        """Read the weights and the seal from a stream, while processes that connect to ``listener`` map the pages."""
        address = ticket.address["host"], ticket.address["tcp_port"]
        self._close_relay()
        self._fetched.expect(ticket.id)
        if listener is not None:
            serve = partial(weight_server.serve_version, versions=self._fetched, timeout_s=self.settings.timeout_s)
            self._stop_relay = self._start_server(serve, listener)
        try:
            with (
                self._fetched.writing(ticket) as file,
                socket.create_connection(address, self.settings.timeout_s) as connection,
            ):
                weight_server.request(connection, ticket)

                def read(part: Bytes) -> None:
                    weight_server.read_into(connection, part.data)
                    note_progress()

                size = min(self.settings.bucket, HOST_BUCKET)
                crcs = file.fill(size, read, lambda: weight_server.read_exactly(connection, Seal.size(ticket.table)))
            opened = self._fetched.open(ticket.id, self.settings.timeout_s, WeightFile.lend)
            assert opened is not None, "it was written just now"
            self._use_maps_of(os.getpid())
            return MappedWeights(opened[0], ticket.table, self._maps).snapshot(ticket, crcs)
        except BaseException:
            self._fetched.stop_waiting()
            self._close_relay()
            raise

    def _close_relay(self) -> None:
        if self._stop_relay is not None:
            self._stop_relay()
            self._stop_relay = None

    def _drop_fetched(self) -> None:
        """Free the versions that this process has fetched, since another one has the weights for this host."""
        self._close_relay()
        self._fetched.close()
        self._fetched = PublishedVersions(WeightFile)

    def close(self) -> None:
        self._drop_fetched()
        super().close()
        self._maps.clear()


def _has_ended(connection: socket.socket) -> bool:
    """Return True if the other side of a non-blocking socket has closed it."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)  # waits: not at all, the socket does not block
    except BlockingIOError:
        return False
    except OSError:
        return True
