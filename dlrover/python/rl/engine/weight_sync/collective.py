# SPDX-License-Identifier: Apache-2.0
"""Weights by collective broadcast: gloo between hosts, nccl between devices.

::

    sender                           its store                       each receiver
      offer: host, TCP port
      send: an attempt of a ticket  -->       <-- joins the attempt
      waits, with a deadline, until all have joined
      group                         -->       --> enters it, unless it belongs to it
      bucket, bucket, ..., seal      == broadcast ==>               assembled on the host

The group is reused while the same receivers join and nothing fails. A process that fails leaves it, which the other
processes notice; then the ticket can be sent again.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.engine.model.ranks import serve_store, use_device, use_interface_towards
from dlrover.python.rl.engine.weight_sync.base import Pieces, Seal, SenderBase, SyncSettings, Ticket, assemble_snapshot
from dlrover.python.rl.engine.weight_sync.buckets import Bytes, CrcTally, HostArena, bucket_spans

_SENDER_RANK = 0
_POLL_S = 50e-6
_NCCL_TIMEOUT_FACTOR = 10
"""Limit of nccl's watchdog, which kills a process that waits too long, as a multiple of the settings' timeout."""


class BroadcastTransport(SenderBase):
    """Implements ``WeightTransport``. All receivers receive at the same time, and the sender waits for them; its
    settings need ``receivers`` and ``address``. Buckets are on ``device``: ``cpu`` for gloo, CUDA devices for nccl."""

    waits_for_receivers = True

    def __init__(self, settings: SyncSettings | None = None) -> None:
        super().__init__(settings)
        self._timeout = timedelta(seconds=self.settings.timeout_s)
        self._server: Any = None
        self._client: tuple[Any, Any] = (None, None)
        self._member, self._members = uuid4().hex, frozenset[bytes]()
        self._group = BroadcastGroup("", None, self.settings.timeout_s)
        self._arena = HostArena()
        self._pinned: Any = torch.empty(0, dtype=torch.uint8)

    def _address(self) -> dict[str, Any]:
        host = self.settings.address
        if self._server is None:
            use_interface_towards(host)
            self._server = serve_store(host, 0, self.settings.timeout_s)
        sizes = {"receivers": self.settings.receivers, "bucket": self.settings.bucket}
        return {"host": host, "tcp_port": self._server.port, **sizes}

    def _write(self, ticket: Ticket, pieces: Pieces) -> WeightStamp:
        tally, size = CrcTally(ticket.table), ticket.address["bucket"]
        spans = bucket_spans(ticket.table, size)
        with self._allocated_bucket(size) as bucket, self._entered_group(ticket, self._gather_receivers) as group:
            for number, of_bucket in groupby(pieces, lambda piece: piece[0] // size):
                for offset, piece in of_bucket:
                    bucket[offset % size :][: len(piece)].copy_(piece)
                start, stop = spans[number]
                part = bucket[: stop - start]
                tally.update(self._on_host(part), start, stop)
                group.broadcast(part)
            seal = Seal.of(ticket, tally.crcs)
            packed = torch.frombuffer(bytearray(seal.pack()), dtype=torch.uint8)
            group.broadcast(packed.to(self.settings.device))
        return seal.stamp

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        size = ticket.address["bucket"]
        seal = torch.empty(Seal.size(ticket.table), dtype=torch.uint8, device=self.settings.device)
        with self._allocated_bucket(size) as bucket, self._entered_group(ticket, self._join) as group:

            def read(part: Bytes) -> None:
                received = bucket[: len(part)]
                group.broadcast(received)
                np.copyto(part, self._on_host(received))

            flat, crcs = self._arena.fill(ticket, size, read)
            group.broadcast(seal)
            # Within the group, which this process leaves if the bytes are not what was sent.
            return assemble_snapshot(ticket, flat, crcs, Seal.unpack(self._on_host(seal).tobytes()))

    def _on_host(self, part: Any) -> Bytes:
        """Return the bytes of a ``uint8`` tensor; a device's are in page-locked memory until the next call."""
        on_host = part
        if part.device.type != "cpu":
            if len(self._pinned) < len(part):
                self._pinned = torch.empty(len(part), dtype=torch.uint8, pin_memory=True)
            on_host = self._pinned[: len(part)].copy_(part)
        data: Bytes = on_host.numpy()
        return data

    @contextmanager
    def _allocated_bucket(self, nbytes: int) -> Iterator[Any]:
        bucket = torch.empty(nbytes, dtype=torch.uint8, device=self.settings.device)
        if self.settings.memory is not None:
            self.settings.memory.hold(f"weight sync of {self.settings.name}", "buffer", [bucket])
        yield bucket
        if self.settings.memory is not None:  # released before it is freed: gloo's threads keep it for a moment
            self.settings.memory.release(bucket)

    @contextmanager
    def _entered_group(self, ticket: Ticket, enter: Callable[[Ticket], "BroadcastGroup"]) -> Iterator["BroadcastGroup"]:
        """Use the group that ``enter`` returns; after a failure this process leaves it."""
        try:
            with _as_connection_error():
                self._group = enter(ticket)
            yield self._group
        except BaseException as error:
            self._group.leave()
            self._member, self._members, self._client = uuid4().hex, frozenset(), (None, None)
            if not isinstance(error, ConnectionError):
                raise
            raise WeightSyncError(
                f"the broadcast of {ticket} to {ticket.address['receivers']} receivers failed at"
                f" {self.settings.name}: a process has ended or is late: {error}"
            ) from error
        finally:
            if self._server is not None:
                with suppress(RuntimeError):
                    self._server.delete_key(ticket.id)  # late receivers wait for the next attempt

    def _gather_receivers(self, ticket: Ticket) -> "BroadcastGroup":
        """Wait, as the sender, for all receivers, and choose a group: the last one if the same receivers came."""
        attempt = uuid4().hex
        self._server.set(ticket.id, attempt)
        store, receivers = dist.PrefixStore(attempt, self._server), ticket.address["receivers"]
        keys = [f"receiver {rank}" for rank in range(1, receivers + 1)]
        try:
            store.wait(keys, self._timeout)
        except dist.DistStoreError:
            joined = f"{store.add('receivers', 0)} of {receivers} receivers of version {ticket.version} joined"
            raise WeightSyncError(f"{joined} within {self.settings.timeout_s:g} s") from None
        members = frozenset(store.get(key) for key in keys)
        name = self._group.name if self._members == members else uuid4().hex
        self._members = members
        store.set("group", name)
        return self._enter(name, store, _SENDER_RANK, receivers)

    def _join(self, ticket: Ticket) -> "BroadcastGroup":
        """Join, as a receiver, once the sender has begun, and wait for the group's name."""
        address, receivers = (ticket.address["host"], ticket.address["tcp_port"]), ticket.address["receivers"]
        if self._client[0] != address:
            use_interface_towards(address[0])
            self._client = address, dist.TCPStore(*address, is_master=False, timeout=self._timeout)
        client = self._client[1]
        store = dist.PrefixStore(client.get(ticket.id).decode(), client)  # waits: as long as the store's own timeout
        rank = store.add("receivers", 1)
        if rank > receivers:
            raise WeightSyncError(f"{ticket.sender} sends to {receivers} receivers, and as many have joined already")
        store.set(f"receiver {rank}", self._member)
        name = store.get("group").decode()  # waits: as long as the store's own timeout
        return self._enter(name, store, rank, receivers)

    def _enter(self, name: str, store: Any, rank: int, receivers: int) -> "BroadcastGroup":
        """Enter the group with this name, unless this process belongs to it."""
        if self._group.name == name:
            return self._group
        self._group.leave()
        if self.settings.is_on_host:
            backend: Any = dist.ProcessGroupGloo(store, rank, receivers + 1, timeout=self._timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout * _NCCL_TIMEOUT_FACTOR
            use_device(self.settings.device)
            backend = dist.ProcessGroupNCCL(store, rank, receivers + 1, options)
        return BroadcastGroup(name, backend, self.settings.timeout_s)

    def close(self) -> None:
        self._group.leave()
        self._server, self._client = None, (None, None)


@contextmanager
def _as_connection_error() -> Iterator[None]:
    """Raise errors of torch as ConnectionError: other processes cause them."""
    try:
        yield
    except RuntimeError as error:  # the base of torch's DistError
        raise ConnectionError(str(error)) from error


class BroadcastGroup:
    """A process group with a unique name, "" for none. Only this object refers to ``backend``: leaving frees it."""

    def __init__(self, name: str, backend: Any, timeout_s: float) -> None:
        self.name, self._backend, self._timeout_s = name, backend, timeout_s

    def broadcast(self, tensor: Any) -> None:
        """Broadcast from the sender to all receivers. Raises ConnectionError if a rank has ended or is late."""
        with _as_connection_error():
            if self._backend.name() != "nccl":
                self._backend.broadcast(tensor, _SENDER_RANK).wait()  # waits: as long as the group's own timeout
                return
            # Neither nccl's first call, which connects, nor its wait() has a deadline on the host.
            result: Future[None] = Future()
            threading.Thread(target=self._run, args=(self._backend, tensor, result), daemon=True).start()
            try:
                result.result(self._timeout_s)
            except TimeoutError:
                raise ConnectionError(f"a broadcast has not ended within {self._timeout_s:g} s") from None

    def _run(self, backend: Any, tensor: Any, result: Future[None]) -> None:
        try:
            work = backend.broadcast(tensor, _SENDER_RANK)
            while not work.is_completed() and self._backend is backend:
                time.sleep(_POLL_S)
            # nccl also reports failed work as complete, whose bucket has other bytes than were sent.
            failure = None
            with suppress(TypeError):  # earlier versions of torch cannot return it to Python
                failure = work.exception()
            if failure is not None:
                raise RuntimeError(f"nccl failed: {failure}")
            result.set_result(None)
        except RuntimeError as error:
            result.set_exception(error)

    def leave(self) -> None:
        """Close the connections, which the other ranks notice."""
        backend, self._backend, self.name = self._backend, None, ""
        if backend is not None and backend.name() == "nccl":
            backend.abort()
