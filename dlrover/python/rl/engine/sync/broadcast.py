"""Weights by a collective broadcast: gloo between hosts, nccl between devices.

::

    source                           its store                       each sink
      offer: "host, port"
      send: "an attempt of ticket"  -->       <-- "here", once there is an attempt
      waits, with a deadline, until all have come
      "group"                       -->       --> enters it, if it is not in it
      bucket, bucket, ..., seal      == broadcast ==>               put together on the host

The group is one of their own, beside whatever group the train ranks have. It is used again as long as the same sinks
come and nothing goes wrong. Who fails leaves it, which the others notice; the ticket can be sent again then.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.sync.base import (
    Offers,
    Seal,
    SyncSettings,
    Ticket,
    WeightSource,
    assemble,
    exhaust,
)
from dlrover.python.rl.engine.sync.buckets import Arena, HostSide, Tally, pack, windows
from dlrover.python.rl.engine.torch.ranks import numbered
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp

_SOURCE = 0
_LOOK_S = 50e-6
_NCCL_PATIENCE = 10
"""nccl's own watch ends the process of who waits too long: it waits so many times longer than we do."""


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
        self._own: Any = None
        self._known: tuple[Any, Any] = (None, None)
        self._member, self._members = uuid4().hex, frozenset[bytes]()
        self._group = Group("", None, self.settings.patience_s)
        self._arena, self._host = Arena(), HostSide()

    def _where(self) -> dict[str, Any]:
        if self._own is None:
            self._own = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout())
        told = {"sinks": self.settings.sinks, "bucket": self.settings.bucket}
        return {"host": self._address, "port": self._own.port, **told}

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        """See :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.send`."""
        stream = self._pieces(ticket, source, ticket.where["bucket"])
        try:
            return self._broadcast(ticket, stream) if self.settings.leads else None
        finally:
            exhaust(stream)

    def _broadcast(self, ticket: Ticket, stream: Iterator[tuple[int, Any]]) -> WeightStamp:
        tally, spans = Tally(ticket.table), windows(ticket.table, ticket.where["bucket"])
        bucket = self._bucket(ticket)
        with self._connected(ticket, self._call) as group:
            for number in pack(stream, [bucket]):
                start, stop = spans[number]
                part = bucket[: stop - start]
                tally.take(self._host.of(part), start, stop)
                group.broadcast(part)
            seal = Seal.of(ticket, tally.crcs)
            group.broadcast(self._carried(seal.packed()))
        return seal.stamp

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """See :meth:`~dlrover.python.rl.engine.sync.base.WeightTransport.receive`."""
        flat, tally = self._arena.take(ticket.table.nbytes), Tally(ticket.table)
        bucket, sealed = self._bucket(ticket), self._carried(bytes(Seal.size(ticket.table)))
        with self._connected(ticket, self._answer) as group:
            for start, stop in windows(ticket.table, ticket.where["bucket"]):
                part = bucket[: stop - start]
                group.broadcast(part)
                np.copyto(flat[start:stop], self._host.of(part))
                tally.take(flat, 0, stop)
            group.broadcast(sealed)
        return assemble(ticket, flat, tally.crcs, Seal.unpacked(self._host.of(sealed).tobytes()))

    def _bucket(self, ticket: Ticket) -> Any:
        bucket = torch.empty(ticket.where["bucket"], dtype=torch.uint8, device=self.settings.device)
        self._account(bucket)
        return bucket

    def _carried(self, told: bytes) -> Any:
        return torch.frombuffer(bytearray(told), dtype=torch.uint8).to(self.settings.device)

    # -- the group ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _connected(self, ticket: Ticket, meet: Callable[[Ticket], "Group"]) -> Iterator["Group"]:
        """The group in which all are that ``meet`` has met; it is given up if anything goes wrong."""
        try:
            with _others():
                self._group = meet(ticket)
            yield self._group
        except BaseException as error:
            self._give_up()
            if not isinstance(error, ConnectionError):
                raise
            raise WeightSyncError(
                f"the broadcast of version {ticket.version} from {ticket.sender} to {ticket.where['sinks']} receivers"
                f" broke off at {self.settings.who}: one of them is gone or late: {error}"
            ) from error
        finally:
            if self._own is not None:
                with suppress(RuntimeError):
                    self._own.delete_key(ticket.id)  # who comes now waits for the next attempt

    def _call(self, ticket: Ticket) -> "Group":
        """The source waits for all sinks, and says which group it uses: the one it has if they are all in it."""
        attempt = uuid4().hex
        self._own.set(ticket.id, attempt)
        store, sinks = dist.PrefixStore(attempt, self._own), ticket.where["sinks"]
        signs = [f"sink {rank}" for rank in range(1, sinks + 1)]
        try:
            store.wait(signs, self._timeout())
        except dist.DistStoreError:
            came, patience_s = store.add("sinks", 0), self.settings.patience_s
            raise WeightSyncError(
                f"{came} of {sinks} receivers of version {ticket.version} came within {patience_s:g} s"
            ) from None
        members = frozenset(store.get(sign) for sign in signs)
        name = self._group.name if self._members == members else uuid4().hex
        self._members = members
        store.set("group", name)
        return self._entered(name, store, _SOURCE, sinks)

    def _answer(self, ticket: Ticket) -> "Group":
        """A sink comes once the source has begun, and is told the group."""
        address, sinks = (ticket.where["host"], ticket.where["port"]), ticket.where["sinks"]
        if self._known[0] != address:
            self._known = address, dist.TCPStore(*address, is_master=False, timeout=self._timeout())
        known = self._known[1]
        store = dist.PrefixStore(known.get(ticket.id).decode(), known)  # waits: as long as the store's own timeout
        rank = store.add("sinks", 1)
        if rank > sinks:
            raise WeightSyncError(f"{ticket.sender} sends to {sinks} receivers, and as many have come already")
        store.set(f"sink {rank}", self._member)
        return self._entered(store.get("group").decode(), store, rank, sinks)  # waits: likewise

    def _entered(self, name: str, store: Any, rank: int, sinks: int) -> "Group":
        if self._group.name == name:
            return self._group
        self._group.leave()
        return Group(name, self._made(store, rank, sinks + 1), self.settings.patience_s)

    def _give_up(self) -> None:
        self._group.leave()
        self._member, self._members, self._known = uuid4().hex, frozenset(), (None, None)

    def _made(self, store: Any, rank: int, size: int) -> Any:
        if self.settings.on_host:
            return dist.ProcessGroupGloo(store, rank, size, timeout=self._timeout())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout() * _NCCL_PATIENCE
        torch.cuda.set_device(numbered(self.settings.device))
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.settings.patience_s)

    def close(self) -> None:
        """Leave the group."""
        self._group.leave()
        self._own, self._known = None, (None, None)


@contextmanager
def _others() -> Iterator[None]:
    """What torch raises inside comes from the other processes."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        raise ConnectionError(str(error)) from error


class Group:
    """A process group; nobody else refers to torch's object, so that it is gone at once when it is left.

    Args:
        name: unlike any other's; "" for none.
        connected: torch's object.
        patience_s: how long a broadcast may take.
    """

    def __init__(self, name: str, connected: Any, patience_s: float) -> None:
        self.name, self._connected, self._patience_s = name, connected, patience_s

    def broadcast(self, tensor: Any) -> None:
        """From the source to all others.

        Raises:
            ConnectionError: a rank is gone, or late.
        """
        with _others():
            if self._connected.name() != "nccl":
                self._connected.broadcast(tensor, _SOURCE).wait()  # waits: as long as the group's own timeout
                return
            # Of nccl neither the first call, which makes the connections, nor wait() has a deadline for the host.
            done: Future[None] = Future()
            threading.Thread(target=self._finish, args=(self._connected, tensor, done), daemon=True).start()
            try:
                done.result(self._patience_s)
            except TimeoutError:
                raise ConnectionError(f"a broadcast has not ended within {self._patience_s:g} s") from None

    def _finish(self, connected: Any, tensor: Any, done: Future[None]) -> None:
        try:
            work = connected.broadcast(tensor, _SOURCE)
            while not work.is_completed() and self._connected is connected:
                time.sleep(_LOOK_S)
            done.set_result(None)
        except RuntimeError as error:
            done.set_exception(error)

    def leave(self) -> None:
        """Give the group up: its connections close, which the others notice."""
        connected, self._connected, self.name = self._connected, None, ""
        if connected is not None and connected.name() == "nccl":
            connected.abort()
