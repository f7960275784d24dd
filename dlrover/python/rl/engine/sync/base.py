"""The port of weight sync, and what all transports share.

::

    source (train ranks)                    trainer                       sinks (rollouts, frozen engines)
    offer(source) ---- Ticket ------------>    |
                                               |------- Ticket ---------> receive(ticket) --> WeightSnapshot
    send(ticket, source) ==================== bytes, in buckets ========>        |             |
                                                                                 v             v
                                                             compared with the sender's    engine.receive()
                                                             fingerprints, tensor by tensor

A ticket says which weights come, how they look and where; it is a few dozen bytes for each tensor, and all that passes
through the trainer. :meth:`WeightTransport.send` and :meth:`WeightTransport.receive` run at the same time where the
transport can, in any order. Behind the bytes the sender puts a :class:`Seal`. What comes out of ``receive`` is a whole
version, put together in host memory and compared with the seal, or an error: an engine never sees a part, and a device
never holds more for it than a bucket.
"""

import math
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, NamedTuple, Protocol
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp

ALIGN = 64
"""Where tensors begin, and what the size of a bucket is a multiple of."""

HOST_BUCKET, DEVICE_BUCKET = 1 << 20, 1 << 26
"""Bytes of a bucket by default: what stays in a core's cache; what makes a device's copy long beside its start."""


class WeightSource(Protocol):
    """Who has weights to send: the part of a train engine that sync needs."""

    version: int

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Name and whole tensor of each weight, in the same order every time; a collective of all train ranks."""
        ...


class Entry(NamedTuple):
    """A tensor in a :class:`Table`."""

    name: str
    dtype: str
    """torch's name: ``float32``."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Any) -> "Entry":
        """The entry that describes ``tensor``."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        return f"'{self.name}' {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Table:
    """The tensors of a sync, in the order in which they lie one behind the other, each at a multiple of ``ALIGN``."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Any]]) -> "Table":
        """The table of named tensors.

        Raises:
            WeightSyncError: there are none.
        """
        entries = tuple(Entry.of(name, tensor) for name, tensor in named)
        if not entries:
            raise WeightSyncError("the source has no weights to send")
        return cls(entries)

    def spans(self) -> list[tuple[int, int]]:
        """First byte of each tensor, and the one behind its last."""
        found, end = [], 0
        for entry in self.entries:
            start = -(-end // ALIGN) * ALIGN
            end = start + entry.nbytes
            found.append((start, end))
        return found

    @property
    def nbytes(self) -> int:
        """Up to the end of the last tensor."""
        return self.spans()[-1][1]


@dataclass(frozen=True)
class Ticket:
    """Which weights are sent, and where to get them. No byte of them is in it.

    Attributes:
        id: of this sync, unlike any other's.
        version: of the weights.
        sender: what messages call who sends.
        table: the tensors.
        where: the transport's own.
    """

    id: str
    version: int
    sender: str
    table: Table
    where: Mapping[str, Any] = field(default_factory=dict)


class Seal(NamedTuple):
    """What a sender puts behind the weights: which they were."""

    crcs: tuple[int, ...]
    """CRC-32 of each tensor, in the order of the table."""

    stamp: WeightStamp
    """Version and fingerprint of all of them together."""

    @classmethod
    def of(cls, ticket: Ticket, crcs: Sequence[int]) -> "Seal":
        """The seal of weights of ``ticket`` with these fingerprints."""
        return cls(tuple(map(int, crcs)), _snapshot(ticket, {}, crcs).stamp)

    @staticmethod
    def size(table: Table) -> int:
        """Bytes of the seal of a table."""
        return _STAMP.size + 4 * len(table.entries)

    def packed(self) -> bytes:
        """As bytes."""
        stamp = _STAMP.pack(self.stamp.version, bytes.fromhex(self.stamp.fingerprint))
        return stamp + struct.pack(f"<{len(self.crcs)}I", *self.crcs)

    @classmethod
    def unpacked(cls, told: bytes) -> "Seal":
        """What :meth:`packed` gave."""
        version, fingerprint = _STAMP.unpack_from(told)
        crcs = struct.unpack_from(f"<{(len(told) - _STAMP.size) // 4}I", told, _STAMP.size)
        return cls(crcs, WeightStamp(version, fingerprint.hex()))


_STAMP = struct.Struct("<q8s")


@dataclass(frozen=True)
class SyncSettings:
    """What all transports can be told."""

    who: str = "the sender"
    """What messages call this process: ``ACTOR[0]``."""

    leads: bool = True
    """Whether this train rank sends; the others only take part in gathering each tensor."""

    sinks: Annotated[int, Gt(0)] = 1
    """Receivers that take part in each sync, where the transport has to know."""

    bucket_bytes: Annotated[int, Ge(ALIGN)] | None = None
    """Bytes that are handed over at a time, rounded up to a multiple of 64. A tensor may span buckets. None: 1 MiB, and
    64 MiB where ``device`` is an accelerator."""

    patience_s: Annotated[float, Gt(0.0)] = 60.0
    """How long to wait for the other side while nothing moves."""

    device: str = "cpu"
    """What the weights of this process are on, and so the buckets of transports that can pass them between devices."""

    memory: DeviceMemory | None = None
    """Accounts for those buckets."""

    @property
    def on_host(self) -> bool:
        """Whether ``device`` is the host."""
        return bool(torch.device(self.device).type == "cpu")

    @property
    def bucket(self) -> int:
        """Bytes of a bucket: ``bucket_bytes``, rounded up, or the default."""
        wanted = self.bucket_bytes or (HOST_BUCKET if self.on_host else DEVICE_BUCKET)
        return -(-wanted // ALIGN) * ALIGN


class WeightTransport(Protocol):
    """One way of moving weights. One object on each side, made with the same names and settings."""

    def offer(self, source: WeightSource) -> Ticket:
        """Describe the source's current weights; all train ranks call it, the first one's ticket is the one to use.

        The first time for a source, that takes a round through all weights to learn their names and shapes.
        """
        ...

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        """Send what ``ticket`` offers; all train ranks call it. May be repeated, after a failure too.

        Returns:
            Which weights were sent; None on ranks that do not lead.

        Raises:
            WeightSyncError: the source has other weights than were offered, or the other side is gone.
        """
        ...

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """All of the weights, compared with the sender's seal: version, names, shapes, dtypes and bytes.

        Raises:
            WeightSyncError: they did not come, not whole or not intact, or are others; names the sender or the tensors.
        """
        ...

    def close(self) -> None:
        """Release everything; what was received stays valid."""
        ...


class Offers:
    """What every sender has: the table of its source, taken once, and again after it was found to be wrong."""

    def __init__(self, settings: SyncSettings) -> None:
        self.settings = settings
        self._table: Table | None = None
        self._source: Callable[[], WeightSource | None] = lambda: None

    def offer(self, source: WeightSource) -> Ticket:
        """See :meth:`WeightTransport.offer`."""
        if self._table is None or self._source() is not source:
            self._table, self._source = Table.of(source.named_weights()), weakref.ref(source)
        where = self._where() if self.settings.leads else {}
        return Ticket(uuid4().hex, source.version, self.settings.who, self._table, where)

    def _where(self) -> dict[str, Any]:
        return {}

    def _account(self, bucket: Any) -> None:
        """Account for a bucket on this process's device."""
        if self.settings.memory is not None:
            self.settings.memory.hold(f"weight sync of {self.settings.who}", "buffer", [bucket])

    def _pieces(self, ticket: Ticket, source: WeightSource, bucket: int) -> Iterator[tuple[int, Any]]:
        """Offset and bytes (``uint8``) of one piece after the other; none crosses the end of a bucket of this size.

        Raises:
            WeightSyncError: at once: the source has another version than was offered; later: other tensors.
        """
        if source.version != ticket.version:
            raise WeightSyncError(f"version {ticket.version} was offered, and the source is at {source.version}")
        return self._cut(ticket, source, bucket)

    def _cut(self, ticket: Ticket, source: WeightSource, bucket: int) -> Iterator[tuple[int, Any]]:
        pairs = zip_longest(zip(ticket.table.entries, ticket.table.spans(), strict=True), source.named_weights())
        for offered, given in pairs:
            flat = self._checked(ticket, offered and offered[0], given)
            begin, end = offered[1]
            while begin < end:
                stop = min(end, (begin // bucket + 1) * bucket)
                yield begin, flat[begin - offered[1][0] : stop - offered[1][0]]
                begin = stop

    def _checked(self, ticket: Ticket, offered: Entry | None, given: tuple[str, Any] | None) -> Any:
        found = Entry.of(*given) if given else None
        if given is None or found != offered:
            self._table = None
            known = hint(found.name, [entry.name for entry in ticket.table.entries]) if found and not offered else ""
            raise WeightSyncError(
                f"the source of version {ticket.version} gives {found or 'nothing'} where {offered or 'nothing'}"
                f" was offered{known}"
            )
        return given[1].detach().contiguous().reshape(-1).view(torch.uint8)


def exhaust(stream: Iterator[Any]) -> None:
    """Take what is left: the other ranks are in the midst of the same collective, and would wait for this one."""
    deque(stream, maxlen=0)


def assemble(ticket: Ticket, flat: npt.NDArray[np.uint8], found: Sequence[int], seal: Seal) -> WeightSnapshot:
    """The snapshot whose bytes are in ``flat``, if it is what the sender's seal says.

    Args:
        ticket: what it shall be.
        flat: ``[table.nbytes]``.
        found: CRC-32 of each tensor in ``flat``.
        seal: the sender's.

    Raises:
        WeightSyncError: names the tensors that differ, or both stamps where version, names, shapes or dtypes do.
    """
    entries, spans = ticket.table.entries, ticket.table.spans()
    refused = f"weights of version {ticket.version} from {ticket.sender} refused"
    pairs = zip(entries, found, seal.crcs, strict=False)  # of other lengths: the stamps differ, too
    damaged = [f"'{entry.name}'" for entry, ours, theirs in pairs if ours != theirs]
    if damaged:
        raise WeightSyncError(f"{refused}: {', '.join(damaged)} came with other bytes than were sent")
    buffers = {entry.name: flat[start:stop] for entry, (start, stop) in zip(entries, spans, strict=True)}
    snapshot = _snapshot(ticket, buffers, found)
    if snapshot.stamp != seal.stamp:
        raise WeightSyncError(f"{refused}: {seal.stamp} was sent, and the ticket makes {snapshot.stamp} of it")
    return snapshot


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
