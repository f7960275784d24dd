"""Weights by a collective broadcast: gloo between hosts, nccl between devices.

Source and sinks form a process group of their own, beside whatever group the train ranks have. It lives as long as
nothing goes wrong; after a failure the next offer makes another one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.sync.base import (
    Offers,
    SyncSettings,
    Ticket,
    WeightSource,
    assemble,
    exhaust,
    stamp_of,
)
from dlrover.python.rl.engine.sync.buckets import Staging, Tally, host_bytes, pack, windows
from dlrover.python.rl.engine.torch.ranks import numbered
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp

_SOURCE = 0


class BroadcastTransport(Offers):
    """Implements :class:`~dlrover.python.rl.engine.sync.base.WeightTransport`. All sinks receive at the same time.

    Args:
        settings: ``device`` is what the buckets are on: ``cpu`` for gloo, a CUDA device for nccl, the same on both
            sides. ``sinks`` is how many receive; the source's counts.
        address: a name or number of the source's host that the sinks can reach; the source alone needs it.
    """

    def __init__(self, settings: SyncSettings | None = None, address: str = "127.0.0.1") -> None:
        super().__init__(settings or SyncSettings())
        self._address = address
        self._store: Any = None
        self._group = _Group("", None)
        self._staging = Staging(self.settings)

    def _where(self) -> dict[str, Any]:
        if self._store is None:
            self._store = dist.TCPStore(
                self._address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout()
            )
        name = self._group.name or uuid4().hex
        told = {"group": name, "sinks": self.settings.sinks, "bucket": self.settings.bucket}
        return {"host": self._address, "port": self._store.port, **told}

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        """See :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.send`."""
        stream = self._pieces(ticket, source, ticket.where["bucket"])
        try:
            return self._broadcast(ticket, stream) if self.settings.leads else None
        finally:
            exhaust(stream)

    def _broadcast(self, ticket: Ticket, stream: Iterator[tuple[int, Any]]) -> WeightStamp:
        tally, size = Tally(ticket.table), ticket.where["bucket"]
        spans = windows(ticket.table, size)
        bucket = torch.empty(size, dtype=torch.uint8, device=self.settings.device)
        if self.settings.memory is not None:
            self.settings.memory.hold(self.settings.who, "buffer", [bucket])
        with self._connected(ticket, lambda: self._store) as group:
            for number in pack(stream, [bucket]):
                start, stop = spans[number]
                part = bucket[: stop - start]
                tally.take(host_bytes(part), start, stop)
                group.broadcast(part)
            group.broadcast(self._crcs(tally.crcs))
        return stamp_of(ticket, tally.crcs)

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """See :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.receive`."""
        staged, flat = self._staging.take(ticket.table.nbytes)
        tally, crcs = Tally(ticket.table), self._crcs([0] * len(ticket.table.entries))
        with self._connected(ticket, lambda: self._join(ticket)) as group:
            for start, stop in windows(ticket.table, ticket.where["bucket"]):
                part = staged[start:stop]
                group.broadcast(part)
                tally.take(host_bytes(part), start, stop)
            group.broadcast(crcs)
        return assemble(ticket, flat, tally.crcs, crcs.tolist())

    def _crcs(self, values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int64, device=self.settings.device)

    def _join(self, ticket: Ticket) -> Any:
        where = ticket.where
        return dist.TCPStore(where["host"], where["port"], is_master=False, timeout=self._timeout())

    @contextmanager
    def _connected(self, ticket: Ticket, store: Callable[[], Any]) -> Iterator["_Group"]:
        """The group of the ticket, which is given up if anything goes wrong in it."""
        name, sinks = ticket.where["group"], ticket.where["sinks"]
        try:
            if self._group.name != name:
                self._group.leave()
                self._group = _Group(name, self._meet(name, dist.PrefixStore(name, store()), sinks))
            yield self._group
        except RuntimeError as error:  # torch's DistError is one
            self._group.leave()
            raise WeightSyncError(
                f"the broadcast of version {ticket.version} from {ticket.sender} to {sinks} receivers broke off at"
                f" {self.settings.who}: one of them is gone or late: {error}"
            ) from error
        except WeightSyncError:
            self._group.leave()
            raise

    def _meet(self, name: str, store: Any, sinks: int) -> Any:
        rank = _SOURCE if self._store is not None else store.add("sinks", 1)
        if rank > sinks:
            raise WeightSyncError(f"group {name} is for {sinks} receivers, and there are as many already")
        if self.settings.device == "cpu":
            return dist.ProcessGroupGloo(store, rank, sinks + 1, timeout=self._timeout())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout()
        torch.cuda.set_device(numbered(self.settings.device))
        return dist.ProcessGroupNCCL(store, rank, sinks + 1, options)

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.settings.patience_s)

    def close(self) -> None:
        """Leave the group."""
        self._group.leave()
        self._store = None


class _Group:
    """A process group; nobody else refers to torch's object, so that it is gone at once when it is left."""

    def __init__(self, name: str, connected: Any) -> None:
        self.name, self._connected = name, connected

    def broadcast(self, tensor: Any) -> None:
        """From the source to all others."""
        self._connected.broadcast(tensor, _SOURCE).wait()  # waits: as long as the group's own timeout

    def leave(self) -> None:
        """Give the group up: its connections close, which the others notice."""
        if self._connected is not None and self._connected.name() == "nccl":
            self._connected.abort()
        self.name, self._connected = "", None
