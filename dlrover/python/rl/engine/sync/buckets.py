"""Bytes on their way: packed into buckets, fingerprinted as they pass, put together in memory that is used again."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32

from dlrover.python.rl.engine.sync.base import Table

Bytes = npt.NDArray[np.uint8]


class Tally:
    """CRC-32 of each tensor of a table, taken as the bytes come by, which is while they are in the cache.

    Attributes:
        crcs: of each tensor, so far.
    """

    def __init__(self, table: Table) -> None:
        self.crcs = [0] * len(table.entries)
        self._spans, self._at, self._done = table.spans(), 0, 0

    def take(self, window: Bytes, base: int, stop: int) -> None:
        """Go on to offset ``stop``.

        Args:
            window: holds the bytes from where the tally stands up to ``stop``.
            base: offset of its first byte.
            stop: where to end.
        """
        while self._at < len(self._spans):
            start, end = self._spans[self._at]
            begin, until = max(start, self._done), min(end, stop)
            if begin < until:
                self.crcs[self._at] = crc32(window[begin - base : until - base].data, self.crcs[self._at])
            if end > stop:
                break
            self._at += 1
        self._done = stop


def windows(table: Table, size: int) -> list[tuple[int, int]]:
    """Offsets of the buckets of ``size`` bytes: of the first byte in it, and of the one behind its last."""
    end = table.nbytes
    return [(start, min(start + size, end)) for start in range(0, end, size)]


def pack(pieces: Iterator[tuple[int, Any]], buckets: Sequence[Any]) -> Iterator[int]:
    """Copy pieces into buckets, which are filled in turn; yields how many were filled before, once one is full.

    Args:
        pieces: offset and bytes, none across the end of a bucket.
        buckets: tensors ``uint8 [bucket]``, all of one size.
    """
    size = len(buckets[0])
    number = -1
    for offset, piece in pieces:
        if offset // size > number >= 0:
            yield number
        number, inside = divmod(offset, size)
        buckets[number % len(buckets)][inside : inside + len(piece)].copy_(piece)
    if number >= 0:
        yield number


def copy_to_host(target: Bytes, piece: Any) -> None:
    """Copy a ``uint8`` tensor, wherever it is, to host memory of the same length."""
    if piece.device.type == "cpu":
        # A fifth faster than torch's copy, at the size of a bucket; numpy() would keep an engine's tensor from moving.
        np.copyto(target, np.from_dlpack(piece))
    else:
        torch.from_numpy(target).copy_(piece)


class HostSide:
    """The bytes of buckets as the host sees them: themselves, or a copy in page-locked memory that is used again."""

    def __init__(self) -> None:
        self._copy: Any = torch.empty(0, dtype=torch.uint8)

    def of(self, part: Any) -> Bytes:
        """The bytes of a ``uint8`` tensor, until the next call. On a device, all that was to write it has been done."""
        seen = part
        if part.device.type != "cpu":
            if len(self._copy) < len(part):
                self._copy = torch.empty(len(part), dtype=torch.uint8, pin_memory=True)
            seen = self._copy[: len(part)].copy_(part)
        found: Bytes = seen.numpy()
        return found


class Arena:
    """Host memory that is used again once nobody refers to what was in it.

    The pages of new memory cost more than copying into old ones.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[Bytes, weakref.ref[Bytes]]] = []

    def take(self, nbytes: int) -> Bytes:
        """Memory of ``nbytes``, whose content is anything; it is the caller's as long as any view of it lives."""
        free = [block for block, lent in self._blocks if lent() is None and len(block) == nbytes]
        self._blocks = [(block, lent) for block, lent in self._blocks if lent() is not None]
        block = free[0] if free else np.empty(nbytes, dtype=np.uint8)
        view = np.frombuffer(block.data, dtype=np.uint8)  # numpy would name the block itself as a slice's base
        self._blocks.append((block, weakref.ref(view)))
        return view
