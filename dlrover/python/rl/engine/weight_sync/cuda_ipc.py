# SPDX-License-Identifier: Apache-2.0
"""Weights between processes of one node that share a bucket: on a CUDA device by CUDA IPC, else in shared memory.

::

    sender                                             each receiver
      listens at folder/name.socket      <-- connects with the ticket's id
      shares its bucket                  -->  opens it
      fills one half                     -->  copies it to host memory, fingerprints it
      fills the other half ...           <--  first half may be filled again
      sends the seal                     -->  compares

A device holds nothing for this but the bucket: the version is assembled in host memory.
"""

import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.engine.weight_sync.base import ALIGN, Pieces, Seal, SenderBase, StallTimer, SyncSettings, Ticket
from dlrover.python.rl.engine.weight_sync.buckets import Assembly, HostArena, fill_buckets
from dlrover.python.rl.engine.weight_sync.checksums import CrcTally
from dlrover.python.rl.engine.weight_sync.host_copies import HostBuffer

_HALVES = 2


class CudaIpcTransport(SenderBase):
    """Implements ``WeightTransport``. All receivers receive at the same time, and the sender waits for them.

    ``folder`` is required. The sender's ``device`` has the bucket; a receiver opens it.
    """

    waits_for_receivers = True

    def __init__(self, settings: SyncSettings) -> None:
        super().__init__(settings)
        if settings.folder is None:
            raise ValueError("CUDA IPC needs a folder of this node, where both sides meet")
        self._folder = settings.folder
        self._listener: socket.socket | None = None
        self._arena, self._host = HostArena(), HostBuffer()
        self._half = max(ALIGN, self.settings.bucket // _HALVES // ALIGN * ALIGN)

    @property
    def _socket(self) -> Path:
        return self._folder / f"{self.settings.channel}.socket"

    def _address(self) -> dict[str, Any]:
        self._listen()
        return {"bucket": self._half}

    def _listen(self) -> socket.socket:
        if self._listener is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._socket.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.settimeout(self.settings.timeout_s)
            with _short_path(self._socket) as path:
                self._listener.bind(path)
            self._listener.listen()
        return self._listener

    def _write(self, ticket: Ticket, pieces: Pieces) -> WeightStamp:
        tally, number = CrcTally(ticket.table), -1
        with ExitStack() as stack:
            receivers = self._accept(ticket, stack)
            bucket, make_handle = stack.enter_context(self._shared_bucket())
            self._account(bucket)
            for receiver in receivers:
                receiver.send(make_handle())
            for number, _ in fill_buckets(pieces, bucket.split(self._half), tally, self._host):
                self._broadcast(receivers, number)
                if number:  # the next half to fill is the one before this
                    self._await_copies(receivers, number - 1)
            self._await_copies(receivers, number)
            seal = Seal.of(ticket, tally.crcs)
            self._broadcast(receivers, seal.pack())
        return seal.stamp

    def _accept(self, ticket: Ticket, stack: ExitStack) -> list["_Peer"]:
        """The receivers with this ticket; those with another one are refused."""
        listener, receivers = self._listen(), list["_Peer"]()
        while len(receivers) < self.settings.receivers:
            try:
                accepted, _ = listener.accept()  # waits: as long as the socket's own timeout
            except TimeoutError:
                raise WeightSyncError(
                    f"{len(receivers)} of {self.settings.receivers} receivers of version {ticket.version} came within"
                    f" {self.settings.timeout_s:g} s"
                ) from None
            peer = _Peer(accepted, "a receiver", self.settings.timeout_s)
            with suppress(WeightSyncError):  # it has ended
                ticket_id, peer.name = peer.receive()
                if ticket_id == ticket.id:
                    receivers.append(stack.enter_context(peer))
                    continue
            peer.__exit__()
        return receivers

    @contextmanager
    def _shared_bucket(self) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """The bucket, and a function that makes a handle for one other process to open it."""
        if not self.settings.is_on_host:
            bucket = torch.empty(_HALVES * self._half, dtype=torch.uint8, device=self.settings.device)
            yield bucket, lambda: reduce_tensor(bucket)  # one per process: torch counts the handles
            return
        path = self._folder / f"{self.settings.channel}.bucket"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _HALVES * self._half)
            yield _map_tensor(descriptor, _HALVES * self._half), lambda: str(path)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def _broadcast(self, peers: list["_Peer"], message: Any) -> None:
        for peer in peers:
            peer.send(message)

    def _await_copies(self, peers: list["_Peer"], number: int) -> None:
        for peer in peers:
            answer = peer.receive()
            if answer != number:
                raise WeightSyncError(f"{peer.name} answered {answer} where {number} was due")

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        assembly, half = Assembly(ticket, self._arena), ticket.address["bucket"]
        with self._connect(ticket) as sender:
            sender.send((ticket.id, self.settings.name))
            halves = _open_bucket(sender.receive(), half)
            for number, part in enumerate(assembly.parts(half)):
                message = sender.receive()
                if message != number:
                    raise WeightSyncError(f"{ticket.sender} sent bucket {message} where {number} was due")
                np.copyto(part, self._host.read(halves[number % _HALVES][: len(part)]))
                sender.send(number)  # before the part is fingerprinted: the sender fills its half meanwhile
            return assembly.seal(sender.receive())

    def _connect(self, ticket: Ticket) -> "_Peer":
        timer = StallTimer(self.settings.timeout_s, lambda: f"{ticket}: no process listens at {self._socket}")
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                with suppress(FileNotFoundError, ConnectionRefusedError), _short_path(self._socket) as path:
                    connection.connect(path)
                    return _Peer(connection, str(ticket), self.settings.timeout_s)
            finally:
                connection.close()  # without effect where a peer has it
            timer.pause()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._socket.unlink(missing_ok=True)


class _Peer:
    """The process at the other end of a socket, which this object takes over."""

    def __init__(self, connection: socket.socket, name: str, timeout_s: float) -> None:
        connection.setblocking(True)
        self.name, self._timeout_s = name, timeout_s
        self._connection = Connection(connection.detach())

    def __enter__(self) -> "_Peer":
        return self

    def __exit__(self, *details: object) -> None:
        self._connection.close()

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        try:
            if not self._connection.poll(self._timeout_s):
                raise WeightSyncError(f"{self.name}: silent for {self._timeout_s:g} s")
            return self._connection.recv()  # waits: for what poll has seen, a few bytes sent in one go
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> WeightSyncError:
        return WeightSyncError(f"{self.name}: the other process has ended, or gave up")


def _open_bucket(handle: Any, half: int) -> list[Any]:
    if not isinstance(handle, str):
        rebuild, arguments = handle
        return list(rebuild(*arguments).split(half))
    descriptor = os.open(handle, os.O_RDWR | os.O_CLOEXEC)
    try:
        return list(_map_tensor(descriptor, _HALVES * half).split(half))
    finally:
        os.close(descriptor)


def _map_tensor(descriptor: int, size: int) -> Any:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


@contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Another path to the same socket, within the limit of 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
