"""Weights between processes of one node that share a few buckets: on a CUDA device by IPC, else in the node's memory.

::

    source                                             each sink
      listens at folder/name.socket      <-- connects, says which ticket
      shares its two buckets             -->  opens them
      fills one                          -->  copies it to host memory, fingerprints it
      fills the other ...                <--  may be filled again
      sends the seal                     -->  compares

A device holds nothing for this but the shared bucket, halved: the version is put together in host memory.
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
from dlrover.python.rl.engine.sync.base import (
    ALIGN,
    Offers,
    Seal,
    SyncSettings,
    Ticket,
    WeightSource,
    assemble,
    exhaust,
)
from dlrover.python.rl.engine.sync.buckets import Arena, HostSide, Tally, pack, windows
from dlrover.python.rl.engine.sync.waiting import Waiting
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp

_HALVES = 2


class LinkTransport(Offers):
    """Implements :class:`~dlrover.python.rl.engine.sync.base.WeightTransport`. All sinks receive at the same time.

    Args:
        folder: where both sides see the same files; its owner removes it at the end.
        name: of the sender among those who use the folder.
        settings: ``device`` of the sender is what the bucket is on, a sink has it open; ``sinks`` is how many receive.
    """

    def __init__(self, folder: Path, name: str, settings: SyncSettings | None = None) -> None:
        super().__init__(settings or SyncSettings())
        self._folder, self._name = Path(folder), name
        self._listener: socket.socket | None = None
        self._arena, self._host = Arena(), HostSide()
        self._half = max(ALIGN, self.settings.bucket // _HALVES // ALIGN * ALIGN)

    @property
    def _socket(self) -> Path:
        return self._folder / f"{self._name}.socket"

    def _where(self) -> dict[str, Any]:
        if self._listener is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._socket.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.settimeout(self.settings.patience_s)
            with _short(self._socket) as path:
                self._listener.bind(path)
            self._listener.listen()
        return {"half": self._half}

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        """See :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.send`."""
        stream = self._pieces(ticket, source, ticket.where["half"])
        try:
            return self._hand_over(ticket, stream) if self.settings.leads else None
        finally:
            exhaust(stream)

    def _hand_over(self, ticket: Ticket, stream: Iterator[tuple[int, Any]]) -> WeightStamp:
        tally, spans = Tally(ticket.table), windows(ticket.table, self._half)
        with ExitStack() as stack:
            sinks = self._accept(ticket, stack)
            whole, opening = stack.enter_context(self._shared())
            self._account(whole)
            for sink in sinks:
                sink.tell(opening())
            halves = whole.split(self._half)
            for number in pack(stream, halves):
                start, stop = spans[number]
                tally.take(self._host.of(halves[number % _HALVES][: stop - start]), start, stop)
                self._tell(sinks, number)
                if number:  # the next to be filled is the one before this
                    self._hear(sinks, number - 1)
            self._hear(sinks, len(spans) - 1)
            seal = Seal.of(ticket, tally.crcs)
            self._tell(sinks, seal.packed())
        return seal.stamp

    def _accept(self, ticket: Ticket, stack: ExitStack) -> list["_Peer"]:
        """The sinks that ask for this ticket; those that ask for another one are turned away."""
        self._where()
        assert self._listener is not None
        found: list[_Peer] = []
        while len(found) < self.settings.sinks:
            try:
                accepted, _ = self._listener.accept()  # waits: as long as the socket's own timeout
            except TimeoutError:
                raise WeightSyncError(
                    f"{len(found)} of {self.settings.sinks} receivers of version {ticket.version} came within"
                    f" {self.settings.patience_s:g} s"
                ) from None
            peer = _Peer(accepted, "a receiver", self.settings.patience_s)
            with suppress(WeightSyncError):  # one that is gone already
                wanted, peer.who = peer.hear()
                if wanted == ticket.id:
                    found.append(stack.enter_context(peer))
                    continue
            peer.__exit__()
        return found

    @contextmanager
    def _shared(self) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """The bucket, and what gives what one other process needs to open it."""
        if not self.settings.on_host:
            whole = torch.empty(_HALVES * self._half, dtype=torch.uint8, device=self.settings.device)
            yield whole, lambda: reduce_tensor(whole)  # for each anew: torch counts who has it open
            return
        path = self._folder / f"{self._name}.bucket"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _HALVES * self._half)
            yield _mapped_tensor(descriptor, _HALVES * self._half), lambda: str(path)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def _tell(self, peers: list["_Peer"], what: Any) -> None:
        for peer in peers:
            peer.tell(what)

    def _hear(self, peers: list["_Peer"], number: int) -> None:
        for peer in peers:
            heard = peer.hear()
            if heard != number:
                raise WeightSyncError(f"{peer.who} answered {heard} where {number} was due")

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """See :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.receive`."""
        flat = self._arena.take(ticket.table.nbytes)
        tally, half = Tally(ticket.table), ticket.where["half"]
        with self._connect(ticket) as source:
            source.tell((ticket.id, self.settings.who))
            halves = _opened(source.hear(), half)
            for number, (start, stop) in enumerate(windows(ticket.table, half)):
                told = source.hear()
                if told != number:
                    raise WeightSyncError(f"{ticket.sender} sent bucket {told} where {number} was due")
                np.copyto(flat[start:stop], self._host.of(halves[number % _HALVES][: stop - start]))
                source.tell(number)
                tally.take(flat, 0, stop)
            seal = Seal.unpacked(source.hear())
        return assemble(ticket, flat, tally.crcs, seal)

    def _connect(self, ticket: Ticket) -> "_Peer":
        told = f"version {ticket.version} from {ticket.sender}"
        waiting = Waiting(self.settings.patience_s, lambda: f"{told}: nobody listens at {self._socket}")
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                with suppress(FileNotFoundError, ConnectionRefusedError), _short(self._socket) as path:
                    connection.connect(path)
                    return _Peer(connection, told, self.settings.patience_s)
            finally:
                connection.close()  # of no effect where a peer has it
            waiting.pause()

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._socket.unlink(missing_ok=True)


class _Peer:
    """Another process at the end of a socket.

    Args:
        connection: the socket, which becomes this object's.
        who: what messages call it.
        patience_s: how long it may be silent.
    """

    def __init__(self, connection: socket.socket, who: str, patience_s: float) -> None:
        connection.setblocking(True)
        self.who, self._patience_s = who, patience_s
        self._connection = Connection(connection.detach())

    def __enter__(self) -> "_Peer":
        return self

    def __exit__(self, *details: object) -> None:
        self._connection.close()

    def tell(self, what: Any) -> None:
        """Send a small object."""
        try:
            self._connection.send(what)
        except OSError as error:
            raise self._lost() from error

    def hear(self) -> Any:
        """The next object.

        Raises:
            WeightSyncError: none came in time, or the process is gone.
        """
        try:
            if not self._connection.poll(self._patience_s):
                raise WeightSyncError(f"{self.who}: silent for {self._patience_s:g} s")
            return self._connection.recv()  # waits: for what poll has seen, a few bytes sent in one go
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def _lost(self) -> WeightSyncError:
        return WeightSyncError(f"{self.who}: the other process is gone, or gave up")


def _opened(shared: Any, half: int) -> list[Any]:
    if not isinstance(shared, str):
        rebuild, arguments = shared
        return list(rebuild(*arguments).split(half))
    descriptor = os.open(shared, os.O_RDWR | os.O_CLOEXEC)
    try:
        return list(_mapped_tensor(descriptor, _HALVES * half).split(half))
    finally:
        os.close(descriptor)


def _mapped_tensor(descriptor: int, size: int) -> Any:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A path of a socket may have 107 bytes only: this one leads to the same place."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
