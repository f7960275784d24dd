# SPDX-License-Identifier: Apache-2.0
"""Weights that stay in their sender's memory until receivers fetch them, as often as they need.

::

    sender's process                                receivers
      file of version 7    ---- its pages ------>     of the same host: a descriptor, through a socket of the host
      file of version 8    ---- a stream ------->     of other hosts: through TCP
      a thread that listens, one thread per receiver

    of the receivers of another host one takes the stream into such a file of its own, and gives the others its pages

Neither side waits for the other, so the call that publishes and the call that receives can each be repeated alone, by
another process too. If the sender no longer has a version, receivers raise
:class:`~dlrover.python.rl.common.errors.WeightsLost` and their caller asks for another ticket.
"""

import os
import socket
import time
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
from dlrover.python.rl.engine.weight_sync.base import (
    HOST_BUCKET,
    Pieces,
    Seal,
    StallTimer,
    SyncSettings,
    Ticket,
    WeightSource,
    refuse_adapters,
)
from dlrover.python.rl.engine.weight_sync.buckets import Bytes, CrcTally, MappedWeights, WeightFile
from dlrover.python.rl.engine.weight_sync.weight_server import (
    AVAILABLE,
    BACKLOG,
    GONE,
    KeepingSender,
    PublishedVersions,
    WeightServer,
    connect_on_host,
    listen_on_host,
    peer_credentials,
    read_exactly,
    read_into,
    request,
    serve_version,
)

_LOG = get_logger(__name__)

_TURN_S, _PATIENCE_S, _PAUSE_S = 0.2, 1.0, 0.01
"""The time that the receivers of a host leave to the one that has passed weights on before, and the time after which
each may fetch its own."""


class PullTransport(KeepingSender[WeightFile]):
    """Implements ``WeightTransport``. Any number of receivers, at any time; a version stays until the second after it.

    The sender's ``address`` is required if receivers are on other hosts. With ``maps_pages`` the receivers of a host
    map one copy; else each gets its own through TCP.
    """

    def __init__(self, settings: SyncSettings | None = None, *, maps_pages: bool = True) -> None:
        super().__init__(settings)
        self._maps_pages = maps_pages
        self._versions, self._fetched = PublishedVersions(WeightFile), PublishedVersions(WeightFile)
        self._names: dict[str, Any] = {}
        self._relay: WeightServer | None = None  # gives what this process has fetched to others of its host
        self._mapped_process = 0
        self._maps: dict[int, HostPages] = {}

    def offer(self, source: WeightSource) -> Ticket:
        ticket = super().offer(source)
        if self.settings.is_leader:
            with suppress(WeightSyncError, OSError):  # send() raises it, once this rank has taken part in the gathering
                file = self._versions.prepare(ticket.table)
                file.reserve()
                file.pages.lock(torch.device(self.settings.device))
        return ticket

    def _address(self) -> dict[str, Any]:
        host = self.settings.address
        if self._server is None:
            name = f"dlrover-weights-{uuid4().hex}"
            remote, local = listening_socket(host, BACKLOG), listen_on_host(name)
            self._server = self._serve(self._versions, local, remote)
            self._names = {"local_name": name, "tcp_port": int(remote.getsockname()[1])}
        return {**self._names, "host": host}

    def _serve(self, versions: PublishedVersions[WeightFile], *listeners: socket.socket) -> WeightServer:
        timeout_s = self.settings.timeout_s
        return WeightServer(partial(serve_version, versions=versions, timeout_s=timeout_s), listeners, timeout_s)

    def _write(self, ticket: Ticket, pieces: Pieces) -> WeightStamp:
        with self._versions.writing(ticket) as file:
            return file.write(ticket, pieces).stamp

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """See ``WeightTransport``. Raises ``WeightsLost`` if the sender lacks them, or does not answer."""
        refuse_adapters(ticket)
        try:
            if not self._maps_pages:
                return self._fetch(ticket)
            local = connect_on_host(ticket.address["local_name"], self.settings.timeout_s)
            if local is None:
                return self._receive_from_afar(ticket)
            self._drop_fetched()  # if the sender was on another host before
            return self._map(ticket, local)
        except OSError as error:
            raise WeightsLost(f"{ticket} cannot be fetched: {error}") from error

    # -- from this host -----------------------------------------------------------------------------------------------

    def _map(self, ticket: Ticket, connection: socket.socket) -> WeightSnapshot:
        """Map the pages of the process at the other end, which has the ticket's weights or is about to."""
        with connection:
            connection.sendall(ticket.id.encode("ascii"))
            _, descriptors, _, _ = socket.recv_fds(connection, len(AVAILABLE), 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise WeightsLost(f"{ticket} {GONE}")
            self._use_maps_of(peer_credentials(connection)[0])
            try:
                read_exactly(connection, len(AVAILABLE))
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
        return weights.snapshot(ticket, tally.crcs)

    # -- from another host --------------------------------------------------------------------------------------------

    def _receive_from_afar(self, ticket: Ticket) -> WeightSnapshot:
        """Map what another receiver of this host fetches; if there is none, fetch the weights for all of them."""
        name, began_s = f"dlrover-weights-of-{ticket.id}", time.monotonic()
        while True:
            if (weights := self._follow_another(ticket, name)) is not None:
                return weights
            waited_s, listener = time.monotonic() - began_s, None
            if self._relay is not None or waited_s > _TURN_S:
                with suppress(OSError):  # another one was faster, or one that has ended is about to give it back
                    listener = listen_on_host(name)
            if listener is not None or waited_s > _PATIENCE_S:
                return self._fetch(ticket, listener)
            time.sleep(_PAUSE_S)

    def _follow_another(self, ticket: Ticket, name: str) -> WeightSnapshot | None:
        """None if no process passes the weights on, or it has ended before they were whole."""
        try:
            if (relay := connect_on_host(name, self.settings.timeout_s)) is None:
                return None
            weights = self._map(ticket, relay)
        except (WeightSyncError, OSError) as error:  # it has ended, is stopped, or has other bytes
            _LOG.warning("%s: the process that passes the weights on has failed, trying without it: %s", ticket, error)
            return None
        if self._mapped_process != os.getpid():
            self._drop_fetched()
        return weights

    def _fetch(self, ticket: Ticket, listener: socket.socket | None = None) -> WeightSnapshot:
        """Take the weights as a stream, then the seal; those who come to ``listener`` map them while they come."""
        shown = min(self.settings.bucket, HOST_BUCKET)
        address = ticket.address["host"], ticket.address["tcp_port"]
        self._close_relay()
        self._fetched.expect(ticket.id)
        if listener is not None:
            self._relay = self._serve(self._fetched, listener)
        try:
            with (
                self._fetched.writing(ticket) as file,
                socket.create_connection(address, self.settings.timeout_s) as connection,
            ):
                request(connection, ticket)

                def read(part: Bytes) -> None:
                    read_into(connection, part.data)
                    note_progress()

                crcs = file.fill(shown, read, lambda: read_exactly(connection, Seal.size(ticket.table)))
            opened = self._fetched.open(ticket.id, self.settings.timeout_s, WeightFile.lend)
            assert opened is not None, "it was written just now"
            self._use_maps_of(os.getpid())
            return MappedWeights(opened[0], ticket.table, self._maps).snapshot(ticket, crcs)
        except BaseException:
            self._fetched.stop_waiting()
            self._close_relay()
            raise

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _drop_fetched(self) -> None:
        """Give back the memory of what this process has fetched: another one has the weights for all of this host."""
        self._close_relay()
        self._fetched.close()
        self._fetched = PublishedVersions(WeightFile)

    def close(self) -> None:
        self._drop_fetched()
        super().close()
        self._maps.clear()


def _has_ended(connection: socket.socket) -> bool:
    """Return True if the other side of a socket that does not block has closed it, or ended."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)  # waits: not at all, the socket does not block
    except BlockingIOError:
        return False
    except OSError:
        return True
