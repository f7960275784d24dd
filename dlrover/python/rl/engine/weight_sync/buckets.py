# SPDX-License-Identifier: Apache-2.0
"""Buckets of bytes: filled, fingerprinted as they pass, and assembled in host memory that is reused."""

import errno
import fcntl
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.weight_sync.base import WeightTable

Bytes = npt.NDArray[np.uint8]


class CrcTally:
    """CRC-32 of each tensor of a table, updated while the passing bytes are in the cache."""

    def __init__(self, table: WeightTable) -> None:
        self.crcs = [0] * len(table.entries)
        self._spans, self._tensor, self._offset = table.spans(), 0, 0

    def update(self, window: Bytes, base: int, stop: int) -> None:
        """Continue to offset ``stop``; ``window`` has the bytes from offset ``base``."""
        while self._tensor < len(self._spans):
            start, end = self._spans[self._tensor]
            begin, until = max(start, self._offset), min(end, stop)
            if begin < until:
                self.crcs[self._tensor] = crc32(window[begin - base : until - base].data, self.crcs[self._tensor])
            if end > stop:
                break
            self._tensor += 1
        self._offset = stop


def bucket_spans(table: WeightTable, size: int) -> list[tuple[int, int]]:
    """Start and stop of each bucket of ``size`` bytes."""
    end = table.nbytes
    return [(start, min(start + size, end)) for start in range(0, end, size)]


def fill_buckets(pieces: Iterator[tuple[int, Any]], buckets: Sequence[Any]) -> Iterator[int]:
    """Copy pieces, none of which crosses the end of a bucket, into ``buckets`` (``uint8 [bucket]``) in turn.

    Yields:
        The number of each bucket once it is full, counted from 0 over all rounds.
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
    """Copy a ``uint8`` tensor of any device to host memory of the same length."""
    if piece.device.type == "cpu":
        # A fifth faster than torch's copy at the size of a bucket; numpy() would keep an engine's tensor from moving.
        np.copyto(target, np.from_dlpack(piece))
    else:
        torch.from_numpy(target).copy_(piece)


class HostBuffer:
    """Gives the host access to buckets: to themselves, or to a copy in page-locked memory that is reused."""

    def __init__(self) -> None:
        self._copy: Any = torch.empty(0, dtype=torch.uint8)

    def read(self, part: Any) -> Bytes:
        """The bytes of a ``uint8`` tensor, valid until the next call."""
        on_host = part
        if part.device.type != "cpu":
            if len(self._copy) < len(part):
                self._copy = torch.empty(len(part), dtype=torch.uint8, pin_memory=True)
            on_host = self._copy[: len(part)].copy_(part)
        data: Bytes = on_host.numpy()
        return data


class HostArena:
    """Host memory that is reused once nothing refers to it: new pages cost more than copying into old ones."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Bytes, weakref.ref[Bytes]]] = []

    def allocate(self, nbytes: int) -> Bytes:
        """Uninitialised memory, the caller's as long as a view of it lives."""
        free = [block for block, view in self._blocks if view() is None and len(block) == nbytes]
        self._blocks = [(block, view) for block, view in self._blocks if view() is not None]
        block = free[0] if free else np.empty(nbytes, dtype=np.uint8)
        view = np.frombuffer(block.data, dtype=np.uint8)  # numpy would name the block itself as a slice's base
        self._blocks.append((block, weakref.ref(view)))
        return view


def try_lock(descriptor: int, operation: int) -> bool:
    """Lock an open file without waiting; returns True if that succeeded."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def reserve(descriptor: int, size: int) -> None:
    """Give an open file ``size`` bytes of space, without which a store into its mapping would end the process."""
    status = os.fstat(descriptor)
    try:
        if status.st_size != size:
            os.ftruncate(descriptor, size)
        if status.st_blocks * 512 < size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        disk = os.fstatvfs(descriptor)
        free = disk.f_bavail * disk.f_frsize
        raise WeightSyncError(f"no space for weights: {size:,} bytes are needed, {free:,} are free") from error
