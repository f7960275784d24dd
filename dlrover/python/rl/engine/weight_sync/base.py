# SPDX-License-Identifier: Apache-2.0
"""The interface of weight sync, and the code that its transports share.

::

    sender (train ranks)                    trainer                       receivers (rollouts, frozen engines)
    offer(source) ---- Ticket ------------>    |
                                               |------- Ticket ---------> receive(ticket) --> WeightSnapshot
    send(ticket, source) ==================== bytes, in buckets ========>        |             |
                                                                                 v             v
                                                             compared with the sender's    engine.receive()
                                                             fingerprints, tensor by tensor

Only the ticket passes through the trainer: the weights' version, names, shapes and address, a few dozen bytes per
tensor. After the bytes the sender sends a :class:`Seal`. ``receive`` returns a whole version, assembled in host memory
and compared with the seal, or raises: an engine never sees a part, and a device holds at most a bucket, and the matrix
to which adapters are being added. With ``cuda_ipc`` whole versions are on the device instead.
"""

import inspect
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt

from dlrover.python.rl.common.errors import DLRoverRLError, WeightSyncError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.engine.api.weights import SnapshotFile, WeightSnapshot, WeightStamp, tensor_bytes
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory

ALIGN = 64
"""Tensors begin at multiples of 64 bytes, and buckets have multiples."""

HOST_BUCKET, DEVICE_BUCKET = 1 << 20, 1 << 26
"""Default bytes of a bucket: a host's fits a core's cache, a device's makes the start of a copy negligible."""

_SHORT_PAUSE_S, _LONG_PAUSE_S = 50e-6, 5e-3
_SHORT_PAUSES_FOR_S = 0.02


class StallTimer:
    """Pauses while another process works, briefly at first; raises after ``timeout_s`` without progress. ``describe``
    names what is missing; ``check_peer``, called occasionally, raises if the other process has ended."""

    def __init__(
        self, timeout_s: float, describe: Callable[[], str], check_peer: Callable[[], None] = lambda: None
    ) -> None:
        self._timeout_s, self._describe, self._check_peer = timeout_s, describe, check_peer
        self.restart()

    def restart(self) -> None:
        note_progress()
        self._since_s = time.monotonic()

    def pause(self) -> None:
        idle_s = time.monotonic() - self._since_s
        if idle_s > self._timeout_s:
            raise WeightSyncError(f"{self._describe()}: no progress for {self._timeout_s:g} s")
        if idle_s > _SHORT_PAUSES_FOR_S:
            self._check_peer()
        time.sleep(_SHORT_PAUSE_S if idle_s < _SHORT_PAUSES_FOR_S else _LONG_PAUSE_S)


class WeightSource(Protocol):
    """The part of a train engine that weight sync needs."""

    @property
    def version(self) -> int: ...

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        """Iterate over name and whole tensor of each weight, always in the same order; a collective of all train ranks.
        With a torch ``dtype`` parameters are cast before they are gathered; a source without it has them cast here."""


class TensorEntry(NamedTuple):
    name: str
    dtype: str  # torch's name: `float32`
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Any) -> "TensorEntry":
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.shape, self.dtype)

    def __str__(self) -> str:
        return f"'{self.name}' {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class WeightTable:
    """The tensors of a sync, in the order of their bytes, each at a multiple of ``ALIGN``."""

    entries: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Any]]) -> "WeightTable":
        entries = tuple(TensorEntry.of(name, tensor) for name, tensor in named)
        if not entries:
            raise WeightSyncError("the source has no weights to send")
        return cls(entries)

    def spans(self) -> list[tuple[int, int]]:
        """Start and stop of each tensor, in bytes."""
        spans, stop = [], 0
        for entry in self.entries:
            start = -(-stop // ALIGN) * ALIGN
            stop = start + entry.nbytes
            spans.append((start, stop))
        return spans

    @property
    def nbytes(self) -> int:
        """Bytes up to the end of the last tensor."""
        return self.spans()[-1][1]


@dataclass(frozen=True)
class Ticket:
    """Describes a sync without any byte of the weights."""

    id: str  #: unique per sync
    version: int
    sender: str  #: its name in messages
    table: WeightTable
    address: Mapping[str, Any] = field(default_factory=dict)  #: what receivers need to reach the sender
    base: "Ticket | None" = None  #: of adapters: the ticket of the model under them, which was sent before
    scale: float = 1.0  #: factor of the adapters' product

    def __str__(self) -> str:
        return f"version {self.version} from {self.sender}"

    def check_whole(self) -> None:
        """Raise WeightSyncError for a ticket of adapters without their model."""
        if self.base is not None:
            raise WeightSyncError(f"{self} has adapters alone: receive it with a transport of make_transport()")


class Seal(NamedTuple):
    """Follows the weights: a CRC-32 of each tensor in the order of the table, and the stamp."""

    crcs: tuple[int, ...]
    stamp: WeightStamp

    @classmethod
    def of(cls, ticket: Ticket, crcs: Sequence[int]) -> "Seal":
        return cls(tuple(map(int, crcs)), _snapshot(ticket, {}, crcs).stamp)

    @staticmethod
    def size(table: WeightTable) -> int:
        return _STAMP.size + 4 * len(table.entries)

    def pack(self) -> bytes:
        stamp = _STAMP.pack(self.stamp.version, bytes.fromhex(self.stamp.fingerprint))
        return stamp + struct.pack(f"<{len(self.crcs)}I", *self.crcs)

    @classmethod
    def unpack(cls, data: bytes) -> "Seal":
        version, fingerprint = _STAMP.unpack_from(data)
        crcs = struct.unpack_from(f"<{(len(data) - _STAMP.size) // 4}I", data, _STAMP.size)
        return cls(crcs, WeightStamp(version, fingerprint.hex()))


_STAMP = struct.Struct("<q8s")


@dataclass(frozen=True)
class SyncSettings:
    name: str = "the sender"  #: this process's name in messages: ``ACTOR[0]``
    is_leader: bool = True  #: this train rank sends; the other ranks only take part in gathering each tensor
    receivers: Annotated[int, Gt(0)] = 1  #: receivers of each sync, for transports that wait for them
    address: str = "127.0.0.1"  #: the sender's host, as the receivers reach it
    channel: str = "weights"  #: the sender's name, for transports whose endpoints several senders share

    bucket_bytes: Annotated[int, Ge(ALIGN)] | None = None
    """Bytes sent at a time, rounded up to a multiple of 64. None: 1 MiB, or 64 MiB if ``device`` is an accelerator."""

    timeout_s: Annotated[float, Gt(0.0)] = 60.0  #: longest wait for the other side without progress
    device: str = "cpu"  #: device of this process's weights, and of buckets that pass between devices
    memory: DeviceMemory | None = None  #: accounts for those buckets
    dtype: Any = None  #: torch dtype of sent weights, in which the receivers compute; None: the source's dtypes

    @property
    def is_on_host(self) -> bool:
        return bool(torch.device(self.device).type == "cpu")

    @property
    def bucket(self) -> int:
        nbytes = self.bucket_bytes or (HOST_BUCKET if self.is_on_host else DEVICE_BUCKET)
        return -(-nbytes // ALIGN) * ALIGN


class WeightTransport(Protocol):
    """One way of moving weights: one object on each side, made with equal ``channel``."""

    def offer(self, source: WeightSource) -> Ticket:
        """Describe the source's current weights. All train ranks call it, and the leader's ticket is used. The first
        call for a source iterates over its weights."""

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        """Send the weights that ``ticket`` offers; all train ranks call it, and may repeat it after a failure. Returns
        None on ranks that do not lead. Raises WeightSyncError if the source has other weights than it offered, or the
        other side has ended."""

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """Receive the weights and compare version, names, shapes, dtypes and bytes with the sender's seal. Raises
        WeightSyncError, which names the sender or the tensors."""

    def close(self) -> None:
        """Release everything; snapshots stay valid."""


def waits_for_receivers(transport: Any) -> bool:
    """Return True if a transport, or its class, sends while its receivers receive; others keep what was sent."""
    return bool(getattr(transport, "waits_for_receivers", False))


Pieces: TypeAlias = Iterator[tuple[int, Any]]


class SenderBase:
    """Offers weights, and keeps the table of their source until a sync finds that it has changed."""

    def __init__(self, settings: SyncSettings | None = None) -> None:
        self.settings = settings or SyncSettings()
        self._table: WeightTable | None = None
        self._source: Callable[[], WeightSource | None] = lambda: None
        self._unreachable: Exception | None = None

    def offer(self, source: WeightSource) -> Ticket:
        if self._table is None or self._source() is not source:
            self._table, self._source = WeightTable.of(self._named_weights(source)), weakref.ref(source)
        address = {}
        self._unreachable = None
        if self.settings.is_leader:
            try:
                address = self._address()
            except (OSError, DLRoverRLError) as error:  # the other ranks continue, and wait for this one in send()
                self._unreachable = error
        return Ticket(uuid4().hex, source.version, self.settings.name, self._table, address)

    def _named_weights(self, source: WeightSource) -> Iterator[tuple[str, Any]]:
        dtype = self.settings.dtype
        if dtype is None:
            return source.named_weights()
        if "dtype" in inspect.signature(source.named_weights).parameters:
            return source.named_weights(dtype)
        return (
            (name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
            for name, tensor in source.named_weights()
        )

    def _address(self) -> dict[str, Any]:
        """Describe how receivers reach the leading rank; if that fails, :meth:`send` raises the error."""
        return {}

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        if source.version != ticket.version:
            raise WeightSyncError(f"version {ticket.version} was offered, and the source is at {source.version}")
        pieces = self._iterate(ticket, source, ticket.address.get("bucket", self.settings.bucket))
        try:
            if self._unreachable is not None:
                raise self._unreachable
            return self._write(ticket, pieces) if self.settings.is_leader else None
        finally:  # the other ranks are inside the same collective, and would wait for this one
            deque(pieces, maxlen=0)

    def _write(self, ticket: Ticket, pieces: Pieces) -> WeightStamp:
        raise NotImplementedError

    def _iterate(self, ticket: Ticket, source: WeightSource, bucket: int) -> Pieces:
        """Iterate over offset and bytes (``uint8``) of successive pieces, which do not cross ends of buckets."""
        offers = zip(ticket.table.entries, ticket.table.spans(), strict=True)
        for offer, named in zip_longest(offers, self._named_weights(source)):
            entry, offered = named and TensorEntry.of(*named), offer and offer[0]
            if entry != offered:
                self._table = None
                names = [each.name for each in ticket.table.entries]
                nearest = hint(entry.name, names) if entry and not offered else ""
                difference = f"{entry or 'nothing'} where it offered {offered or 'nothing'}{nearest}"
                raise WeightSyncError(f"the source of version {ticket.version} has {difference}")
            flat = named[1].detach().contiguous().reshape(-1).view(torch.uint8)
            begin, end = start, _ = offer[1]
            while begin < end:
                stop = min(end, (begin // bucket + 1) * bucket)
                yield begin, flat[begin - start : stop - start]
                begin = stop


def assemble_snapshot(
    ticket: Ticket, flat: npt.NDArray[np.uint8], crcs: Sequence[int], seal: Seal, path: str = "", flat_at: int = 0
) -> WeightSnapshot:
    """Make a snapshot of the bytes ``flat``, ``[table.nbytes]``, if their ``crcs`` and the ticket match the seal. The
    bytes begin at ``flat_at`` in the open file ``path``, if any. Raises WeightSyncError, which names the tensors whose
    bytes differ, or both stamps if version, names, shapes or dtypes do."""
    entries, spans = ticket.table.entries, ticket.table.spans()
    refusal = f"weights of {ticket} refused"
    pairs = zip(entries, crcs, seal.crcs, strict=False)  # if their lengths differ, the stamps do
    if damaged := [f"'{entry.name}'" for entry, received, sent in pairs if received != sent]:
        raise WeightSyncError(f"{refusal}: {', '.join(damaged)} came with other bytes than were sent")
    buffers = {entry.name: flat[start:stop] for entry, (start, stop) in zip(entries, spans, strict=True)}
    snapshot = _snapshot(ticket, buffers, crcs)
    if snapshot.stamp != seal.stamp:
        raise WeightSyncError(f"{refusal}: {seal.stamp} was sent, but the ticket describes {snapshot.stamp}")
    starts = {entry.name: flat_at + start for entry, (start, _) in zip(entries, spans, strict=True)}
    return replace(snapshot, file=SnapshotFile(path, starts)) if path else snapshot


def _snapshot(ticket: Ticket, buffers: Mapping[str, Any], crcs: Sequence[int]) -> WeightSnapshot:
    entries = ticket.table.entries
    return WeightSnapshot(
        ticket.version,
        buffers,
        shapes={entry.name: entry.shape for entry in entries},
        dtypes={entry.name: entry.dtype for entry in entries},
        fingerprints={entry.name: int(crc) for entry, crc in zip(entries, crcs, strict=True)},
        checked=True,
    )
