# SPDX-License-Identifier: Apache-2.0
"""Weights that stay in their sender's device memory, which receivers on the same device open: by CUDA IPC, or directly
in the sender's process.

::

    sender's process                              each receiver
      version 7, on the device
        <-- a connection, while it reads --
        -- a handle of the memory, and the seal -->   fingerprints it there, compares, and copies it to its weights
      version 8, on the device

Neither side waits for the other. A version that is being read is not overwritten: a later one gets other memory. If the
sender no longer has a version, receivers raise :class:`~dlrover.python.rl.common.errors.WeightsLost`. Without a device
the host stands in, with memory that its processes share.
"""

import os
import pickle
import socket
import struct
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch.multiprocessing.reductions import reduce_tensor

from dlrover.python.rl.common.errors import EngineError, WeightsLost
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.weight_sync import weight_server
from dlrover.python.rl.engine.weight_sync.base import Pieces, Seal, SyncSettings, Ticket, assemble_snapshot
from dlrover.python.rl.engine.weight_sync.buckets import DeviceBuffer, device_fingerprints, map_tensor
from dlrover.python.rl.engine.weight_sync.weight_server import KeepingSender, PublishedVersions

_LENGTH = struct.Struct("<I")
_ASK = b"?"
"""Sent by a receiver that has not opened the memory of a version yet."""

_MOST_OPENED = 2
"""A sender keeps two versions: a step may send two, and a worker that is replaced during it receives both again."""

_versions: "weakref.WeakValueDictionary[str, PublishedVersions[DeviceBuffer]]" = weakref.WeakValueDictionary()
"""The versions of this process's senders, by the names in their tickets."""


class CudaIpcTransport(KeepingSender[DeviceBuffer]):
    """Implements ``WeightTransport`` for any number of receivers on the sender's ``device``, at any time. A version
    stays until the second after it: the device needs memory for two more copies of the weights."""

    def __init__(self, settings: SyncSettings | None = None) -> None:
        super().__init__(settings)
        memory = self.settings.memory or DeviceMemory(self.settings.device)
        self._versions = PublishedVersions(partial(DeviceBuffer, memory, f"weight sync of {self.settings.name}"))
        self._name = ""
        self._opened_of, self._opened = "", dict[str, Any]()  # memory of a sender in another process, by its id

    def _address(self) -> dict[str, Any]:
        if self._stop_server is None:
            self._name = f"dlrover-weights-{uuid4().hex}"
            serve = partial(_serve, versions=self._versions, timeout_s=self.settings.timeout_s)
            self._stop_server = self._start_server(serve, weight_server.listen_on_host(self._name))
            _versions[self._name] = self._versions
        return {"on_device": self._name, "device": _identify(self.settings.device)}

    def _write(self, ticket: Ticket, pieces: Pieces) -> WeightStamp:
        with self._versions.writing(ticket) as buffer:
            for offset, piece in pieces:
                buffer.flat[offset : offset + len(piece)].copy_(piece)
            buffer.seal = Seal.of(ticket, device_fingerprints(ticket.table, buffer.flat))
            return buffer.seal.stamp

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """Raise WeightsLost if the sender lacks the weights or does not answer, and EngineError if its memory cannot be
        opened here; else see ``WeightTransport``. The snapshot is in the sender's memory on the device, which is not
        overwritten while there are references to it."""
        ticket.check_whole()
        here = _identify(self.settings.device)
        if ticket.address["device"] != here:
            raise EngineError(
                f"{ticket} is on the device {ticket.address['device']}, and {self.settings.name} on {here}:"
                " use engine.weight_sync 'pull'"
            )
        try:
            flat, seal, release = self._open(ticket)
        except OSError as error:
            raise WeightsLost(f"{ticket} cannot be fetched: {error}") from error
        try:
            snapshot = assemble_snapshot(ticket, flat, device_fingerprints(ticket.table, flat), seal)
        except BaseException:
            release()
            raise
        buffers = UserDict(snapshot.buffers)  # unlike a dict it can have a finalizer
        weakref.finalize(buffers, _release, flat.device, release).atexit = False
        return replace(snapshot, buffers=buffers, ticket=ticket)

    def _open(self, ticket: Ticket) -> tuple[Any, Seal, Callable[[], object]]:
        """Return the memory with the ticket's weights, their seal, and a function that ends the reading."""
        versions = _versions.get(ticket.address["on_device"])
        if versions is not None:
            buffer = versions.open(ticket.id, self.settings.timeout_s, DeviceBuffer.lend, whole=True)
            if buffer is None:
                raise WeightsLost(f"{ticket} {weight_server.GONE}")
            return buffer.flat, buffer.seal, buffer.give_back
        connection = weight_server.connect_on_host(ticket.address["on_device"], self.settings.timeout_s)
        if connection is None:
            raise WeightsLost(f"{ticket} cannot be fetched: no process of this host listens at its name")
        try:
            flat, seal = self._request(ticket, connection)
        except BaseException:
            connection.close()
            raise
        return flat, seal, connection.close

    def _request(self, ticket: Ticket, connection: socket.socket) -> tuple[Any, Seal]:
        weight_server.request(connection, ticket)
        identity, seal = _receive(connection)
        if self._opened_of != ticket.address["on_device"]:
            self._opened_of, self._opened = ticket.address["on_device"], {}
        if identity not in self._opened:
            connection.sendall(_ASK)
            handle, fault = _receive(connection)
            self._opened = dict(list(self._opened.items())[1 - _MOST_OPENED :])  # before more memory is opened
            self._opened[identity] = _open_memory(handle, fault, ticket, self.settings.device)
        self._opened[identity] = self._opened.pop(identity)  # as the last: the least recently used is dropped first
        return self._opened[identity], seal

    def close(self) -> None:
        super().close()
        self._opened_of, self._opened = "", {}


def _release(device: torch.device, release: Callable[[], object]) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # it may still copy from there
    release()


def _identify(device: str) -> str:
    """Name the device alike in all processes, which may number it differently."""
    if torch.device(device).type != "cuda":
        return "of the host"
    return str(torch.cuda.get_device_properties(device).uuid)


def shares_memory(device: str) -> bool:
    """Return True if other processes can open memory of this process on a CUDA device."""
    try:
        reduce_tensor(torch.zeros(1, device=device))
    except RuntimeError:
        return False
    return True


_DEVICE = 6
"""Place of the device's number among the arguments of ``rebuild_cuda_tensor``."""


def _open_memory(handle: Any, fault: str, ticket: Ticket, device: str) -> Any:
    """Open memory on ``device``, by this process's number for it, which the sender's may differ from."""
    if not isinstance(handle, str):
        try:
            if not fault:
                rebuild, arguments = handle
                own = torch.device(device)
                is_current = own.type == "cuda" and own.index is None
                number = torch.cuda.current_device() if is_current else own.index
                return rebuild(*arguments[:_DEVICE], number, *arguments[_DEVICE + 1 :])
        except RuntimeError as error:
            fault = str(error).splitlines()[0]
        raise EngineError(f"{ticket} cannot be opened by CUDA IPC, use engine.weight_sync 'pull': {fault}")
    descriptor = os.open(handle, os.O_RDWR | os.O_CLOEXEC)
    try:
        return map_tensor(descriptor)
    finally:
        os.close(descriptor)


def _serve(connection: socket.socket, versions: PublishedVersions[DeviceBuffer], timeout_s: float) -> None:
    """Lend a receiver in another process the version that it names, until it closes the connection."""
    ticket_id = weight_server.read_exactly(connection, weight_server.ID_BYTES).decode("ascii", "replace")
    buffer = versions.open(ticket_id, timeout_s, DeviceBuffer.lend, whole=True)
    if buffer is None:
        connection.sendall(weight_server.MISSING)
        return
    try:
        connection.sendall(weight_server.AVAILABLE)
        _send(connection, (buffer.id, buffer.seal))
        connection.settimeout(None)
        if connection.recv(1) == _ASK:  # waits: until the receiver requests a handle, or has read, or has ended
            try:
                handle, fault = buffer.handle(), ""
            except RuntimeError as error:
                handle, fault = None, str(error).splitlines()[0]
            _send(connection, (handle, fault))
            connection.recv(1)  # waits: until the receiver has read, or has ended
    finally:
        buffer.give_back()


def _send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    """Receive a message from a process of this user."""
    (length,) = _LENGTH.unpack(weight_server.read_exactly(connection, _LENGTH.size))
    return pickle.loads(weight_server.read_exactly(connection, length))  # noqa: TID251 -- of a process of this user
