# SPDX-License-Identifier: Apache-2.0
"""Weights that stay in their sender's device memory, which receivers on the same device have open: by CUDA IPC, or as
they are in the sender's own process.

::

    sender's process                              each receiver
      version 7, on the device
        <-- a connection, for as long as it reads --
        -- a handle of the memory, and the seal -->   fingerprints it there, compares, and copies it to its own weights

Neither side waits for the other. A version that is being read is not overwritten: the next one takes other memory. If
the sender no longer has a version, receivers raise :class:`~dlrover.python.rl.common.errors.WeightsLost`. A host stands
in for a device, with memory that its processes share.
"""

import mmap
import os
import pickle
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch.multiprocessing.reductions import reduce_tensor

from dlrover.python.rl.common.errors import WeightsLost, WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.weight_sync.base import (
    Pieces,
    Seal,
    SenderBase,
    SyncSettings,
    Ticket,
    WeightSource,
    WeightTable,
    assemble_snapshot,
    refuse_adapters,
)
from dlrover.python.rl.engine.weight_sync.checksums import BLOCK_BYTES, device_fingerprints
from dlrover.python.rl.engine.weight_sync.weight_server import (
    AVAILABLE,
    ID_BYTES,
    MISSING,
    WeightServer,
    connect_on_host,
    listen_on_host,
    peer_credentials,
    read_exactly,
)

_LENGTH = struct.Struct("<I")
_NOTHING = "-" * ID_BYTES
"""In a request: the receiver has no memory of this sender open."""

_shelves: "weakref.WeakValueDictionary[str, _Shelf]" = weakref.WeakValueDictionary()
"""Of this process's senders, by the names in their tickets."""


class CudaIpcTransport(SenderBase):
    """Implements ``WeightTransport``. Any number of receivers on the sender's ``device``, at any time; a version stays
    until the next one. The device has room for another copy of the weights."""

    sends_adapters_alone = True

    def __init__(self, settings: SyncSettings | None = None) -> None:
        super().__init__(settings)
        self._shelf = _Shelf(self.settings.memory or DeviceMemory(self.settings.device), self.settings.name)
        self._server: WeightServer | None = None
        self._name = ""
        self._opened: tuple[str, Any] = _NOTHING, None  # the memory of a sender in another process, and its id

    # -- the sender ---------------------------------------------------------------------------------------------------

    def offer(self, source: WeightSource) -> Ticket:
        ticket = super().offer(source)
        self._shelf.expect(ticket.id)
        return ticket

    def _address(self) -> dict[str, Any]:
        if self._server is None:
            timeout_s, self._name = self.settings.timeout_s, f"dlrover-weights-{uuid4().hex}"
            serve = partial(_serve, shelf=self._shelf, timeout_s=timeout_s)
            self._server = WeightServer(serve, (listen_on_host(self._name),), timeout_s)
            _shelves[self._name] = self._shelf
        return {"on_device": self._name, "device": _identify(self.settings.device)}

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        self._shelf.expect(ticket.id)
        try:
            return super().send(ticket, source)
        finally:
            self._shelf.expect("")

    def _write(self, ticket: Ticket, pieces: Pieces) -> WeightStamp:
        buffer = self._shelf.take(ticket.table)
        for offset, piece in pieces:
            buffer.flat[offset : offset + len(piece)].copy_(piece)
        seal = Seal.of(ticket, device_fingerprints(ticket.table, buffer.flat))
        self._shelf.put(ticket.id, buffer, seal)
        return seal.stamp

    # -- the receivers ------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """See ``WeightTransport``. Raises ``WeightsLost`` if the sender lacks them, or does not answer. The snapshot is
        on the device, and its memory the sender's: to be dropped before the next version."""
        refuse_adapters(ticket)
        here = _identify(self.settings.device)
        if ticket.address["device"] != here:
            raise WeightSyncError(
                f"{ticket} is on the device {ticket.address['device']}, and {self.settings.name} on {here}:"
                " engine.weight_sync 'pull' reaches it"
            )
        try:
            flat, seal, release = self._open(ticket)
        except OSError as error:
            raise WeightsLost(f"{ticket} cannot be had: {error}") from error
        try:
            snapshot = assemble_snapshot(ticket, flat, device_fingerprints(ticket.table, flat), seal)
        except BaseException:
            release()
            raise
        return replace(snapshot, buffers=_LentBuffers(snapshot.buffers, partial(_release, flat.device, release)))

    def _open(self, ticket: Ticket) -> tuple[Any, Seal, Callable[[], object]]:
        """The memory with the ticket's weights, their seal, and what says that it is no longer read."""
        shelf = _shelves.get(ticket.address["on_device"])
        if shelf is not None:
            found = shelf.open(ticket.id, self.settings.timeout_s)
            if found is None:
                raise WeightsLost(f"{ticket} is not there: the sender has gone on, or sent nothing")
            return found[0].flat, found[1], partial(shelf.close_one, found[0])
        connection = connect_on_host(ticket.address["on_device"], self.settings.timeout_s)
        if connection is None:
            raise WeightsLost(f"{ticket} cannot be had: no process of this host listens at its name")
        try:
            if peer_credentials(connection)[1] != os.getuid():
                raise WeightsLost(f"{ticket} cannot be had: another user's process listens at its name")
            flat, seal = self._request(ticket, connection)
        except BaseException:
            connection.close()
            raise
        return flat, seal, connection.close

    def _request(self, ticket: Ticket, connection: socket.socket) -> tuple[Any, Seal]:
        opened, flat = self._opened
        connection.sendall((ticket.id + opened).encode("ascii"))
        if read_exactly(connection, len(AVAILABLE)) != AVAILABLE:
            raise WeightsLost(f"{ticket} is not there: the sender has gone on, or sent nothing")
        (length,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
        identity, handle, seal = pickle.loads(read_exactly(connection, length))  # of a process of this user
        if identity != opened:
            self._opened = _NOTHING, None  # before another one is opened
            flat = _open_memory(handle)
            self._opened = identity, flat
        return flat, seal

    def close(self) -> None:
        self._shelf.close()
        self._opened = _NOTHING, None
        if self._server is not None:
            self._server.close()
            self._server = None


class _LentBuffers(dict[str, Any]):
    """The buffers of a snapshot; with the last reference to them ``release`` is called."""

    def __init__(self, buffers: Any, release: Callable[[], object]) -> None:
        super().__init__(buffers)
        weakref.finalize(self, release).atexit = False


def _release(device: torch.device, release: Callable[[], object]) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # it may be copying from there
    release()


def _identify(device: str) -> str:
    """The same on all processes, by whatever number they know the device."""
    if torch.device(device).type != "cuda":
        return "of the host"
    return str(torch.cuda.get_device_properties(device).uuid)


# -- the memory --------------------------------------------------------------------------------------------------------


class _Buffer:
    """Memory on a device for the tensors of ``table``; zeros between them."""

    def __init__(self, table: WeightTable, memory: DeviceMemory, owner: str) -> None:
        self.id, self.table, self.readers = uuid4().hex, table, 0
        nbytes = -(-table.nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self._descriptor: int | None = None
        if torch.device(memory.device).type == "cuda":
            self.flat = memory.allocate(owner, "buffer", (nbytes,), torch.uint8)
            return
        memory.require(owner, "buffer", nbytes)
        self._descriptor = os.memfd_create("dlrover-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        os.posix_fallocate(self._descriptor, 0, nbytes)
        self.flat = _map_tensor(self._descriptor)
        memory.hold(owner, "buffer", [self.flat])

    def handle(self) -> Any:
        """What another process opens it with, once."""
        return reduce_tensor(self.flat) if self._descriptor is None else f"/proc/{os.getpid()}/fd/{self._descriptor}"


def _open_memory(handle: Any) -> Any:
    if not isinstance(handle, str):
        rebuild, arguments = handle
        return rebuild(*arguments)
    descriptor = os.open(handle, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map_tensor(descriptor)
    finally:
        os.close(descriptor)


def _map_tensor(descriptor: int) -> Any:
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


class _Shelf:
    """A sender's version, and who reads it. Thread safe."""

    def __init__(self, memory: DeviceMemory, owner: str) -> None:
        self._memory, self._owner = memory, f"weight sync of {owner}"
        self._changed = threading.Condition()
        self._expected = ""
        self._buffer: _Buffer | None = None
        self._version: tuple[str, Seal] | None = None  # in the buffer: the ticket's id, and the seal

    def expect(self, ticket_id: str) -> None:
        """Let receivers of this ticket wait until it is there; "": of none."""
        with self._changed:
            self._expected = ticket_id
            self._changed.notify_all()

    def take(self, table: WeightTable) -> _Buffer:
        """Memory for the next version; the one before is no longer given."""
        with self._changed:
            self._version = None
            buffer = self._buffer
            if buffer is None or buffer.readers or buffer.table != table:
                self._buffer = buffer = None  # before another one is allocated
                self._buffer = buffer = _Buffer(table, self._memory, self._owner)
            return buffer

    def put(self, ticket_id: str, buffer: _Buffer, seal: Seal) -> None:
        with self._changed:
            if buffer is self._buffer:
                self._version = ticket_id, seal
            self._changed.notify_all()

    def open(self, ticket_id: str, timeout_s: float) -> tuple[_Buffer, Seal] | None:
        """The ticket's version, until :meth:`close_one`; None if it is not there."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(ticket_id) or ticket_id != self._expected, timeout_s)
            if self._version is None or self._buffer is None or not self._has(ticket_id):
                return None
            self._buffer.readers += 1
            return self._buffer, self._version[1]

    def _has(self, ticket_id: str) -> bool:
        return self._version is not None and self._version[0] == ticket_id

    def close_one(self, buffer: _Buffer) -> None:
        with self._changed:
            buffer.readers -= 1

    def close(self) -> None:
        with self._changed:
            self._expected, self._buffer, self._version = "", None, None
            self._changed.notify_all()


def _serve(connection: socket.socket, shelf: _Shelf, timeout_s: float) -> None:
    """Lend a receiver of another process the version that it names, until it closes the connection."""
    request = read_exactly(connection, 2 * ID_BYTES).decode("ascii", "replace")
    found = shelf.open(request[:ID_BYTES], timeout_s)
    if found is None:
        connection.sendall(MISSING)
        return
    buffer, seal = found
    try:
        handle = None if request[ID_BYTES:] == buffer.id else buffer.handle()
        message = pickle.dumps((buffer.id, handle, seal))
        connection.sendall(AVAILABLE + _LENGTH.pack(len(message)) + message)
        connection.settimeout(None)
        with suppress(OSError):
            connection.recv(1)  # waits: until the receiver has read, or has ended
    finally:
        shelf.close_one(buffer)
