# SPDX-License-Identifier: Apache-2.0
"""The bytes of weights: copies to host memory, fingerprints, and the memory that holds a version.

A :class:`WeightFile` is memory without a name in any file system: the kernel frees it once no process has it open. It
may be read while it is written::

    head      a page: progress u64 (bytes of data that are written; one more than all of them: complete)
    data      the tensors, each at a multiple of 64
    seal      the sender's, at a multiple of 64
"""

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache
from itertools import islice
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32, crc32_combine
from torch.multiprocessing.reductions import reduce_tensor

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.memory.offload import HostPages
from dlrover.python.rl.engine.weight_sync.base import ALIGN, Pieces, Seal, Ticket, WeightTable, assemble_snapshot

_PART = 1 << 22
"""Bytes that one thread fingerprints at a time, in a third of a millisecond."""

_CORES_PER_THREAD, _MAX_THREADS = 4, 4  # all receivers of a node compute at the same time


class CrcTally:
    """CRC-32 of each tensor of a table, updated while the bytes are in the processor's cache."""

    def __init__(self, table: WeightTable) -> None:
        self.table, self.crcs = table, [0] * len(table.entries)
        self._spans, self._tensor, self._offset = table.spans(), 0, 0

    def update(self, window: npt.NDArray[np.uint8], base: int, stop: int) -> None:
        """Continue to offset ``stop``; ``window`` has the bytes from offset ``base``."""
        tensors, parts = list[int](), list[memoryview]()
        while self._tensor < len(self._spans):
            start, end = self._spans[self._tensor]
            begin, until = max(start, self._offset), min(end, stop)
            for at in range(begin, until, _PART):
                tensors.append(self._tensor)
                parts.append(window[at - base : min(at + _PART, until) - base].data)
            if end > stop:
                break
            self._tensor += 1
        self._offset = stop
        crcs: Iterator[int] = map(crc32, parts)
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD)
        if threads > 1 and sum(map(len, parts)) >= 2 * _PART:
            crcs = _pool(os.getpid(), threads).map(crc32, parts)  # waits: for a computation
        for tensor, part, crc in zip(tensors, parts, crcs, strict=True):
            self.crcs[tensor] = crc32_combine(self.crcs[tensor], crc, len(part))


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return this process's threads; a forked process has none of its parent's."""
    return ThreadPoolExecutor(threads, "dlrover-checksums")


BLOCK_BYTES = 1 << 14
_AT_ONCE = 1 << 24
"""Words that are multiplied on the device at a time."""


def device_fingerprints(table: WeightTable, flat: Any) -> list[int]:
    """Fingerprint the tensors of ``table`` in ``flat``: ``uint8``, whole blocks, zeros between tensors."""
    factors = _factors(flat.device)
    parts = flat.view(torch.int32).split(_AT_ONCE)
    sums = torch.cat([(part.view(-1, len(factors)) * factors).sum(dim=-1) for part in parts]).cpu().numpy()
    return [crc32(sums[start // BLOCK_BYTES : -(-stop // BLOCK_BYTES)].data) for start, stop in table.spans()]


@cache
def _factors(device: torch.device) -> Any:
    random = np.random.Generator(np.random.Philox(key=1)).integers(-(1 << 63), 1 << 63, BLOCK_BYTES // 4)
    return torch.from_numpy(random | 1).to(device)


Bytes = npt.NDArray[np.uint8]

_UNDER_WAY = 1 << 27
"""Bytes that a device copies while the host fingerprints earlier ones."""

_streams: dict[torch.device, Any] = {}


def _copy_to_host(target: Bytes, piece: Any) -> None:
    """Copy a ``uint8`` tensor of any device to host memory of the same length."""
    if piece.device.type == "cpu":
        # A fifth faster than torch's copy at the size of a bucket; numpy() would keep an engine's tensor from moving.
        np.copyto(target, np.from_dlpack(piece))
    else:
        torch.from_numpy(target).copy_(piece)


def stream_to_host(target: Bytes, pages: HostPages, pieces: Pieces) -> Iterator[int]:
    """Copy pieces, offset and bytes (``uint8``) in order, to host memory in ``pages``; a CUDA device copies while the
    caller reads earlier pieces. Yields the offset up to which all bytes have arrived."""
    under_way: deque[tuple[int, Any, Any]] = deque()  # end of a piece, the piece, and the event of its arrival
    arrived = 0
    try:
        for offset, piece in pieces:
            stop = offset + len(piece)
            if piece.device.type != "cuda" or not pages.lock(piece.device):
                _take_arrived(under_way, len(under_way))
                _copy_to_host(target[offset:stop], piece)
                yield stop
                continue
            under_way.append((stop, piece, _begin_copy(target[offset:stop], piece)))
            if under_way[0][2].query() or stop - arrived > _UNDER_WAY:
                arrived = _take_arrived(under_way, 1)
                yield arrived
        while under_way:
            yield _take_arrived(under_way, 1)
    finally:
        _take_arrived(under_way, len(under_way))  # the device would write into memory that is free again


def _begin_copy(target: Bytes, piece: Any) -> Any:
    """Copy a piece on a separate stream; returns the event of its end."""
    if piece.device not in _streams:
        _streams[piece.device] = torch.cuda.Stream(piece.device)
    stream = _streams[piece.device]
    stream.wait_stream(torch.cuda.current_stream(piece.device))
    with torch.cuda.stream(stream):
        torch.from_numpy(target).copy_(piece, non_blocking=True)
        return stream.record_event()


def _take_arrived(under_way: deque[tuple[int, Any, Any]], at_least: int) -> int:
    """Wait for the first pieces, and remove all that have arrived; returns their end."""
    for _, _, arrival in islice(under_way, at_least):
        arrival.synchronize()
    stop = 0
    while under_way and under_way[0][2].query():
        stop, _, _ = under_way.popleft()
    return stop


HEAD_BYTES = 4096
_CACHED_MAPS = 3


def bucket_spans(table: WeightTable, size: int) -> list[tuple[int, int]]:
    end = table.nbytes
    return [(start, min(start + size, end)) for start in range(0, end, size)]


class HostArena:
    """Host memory for versions, reused once no snapshot refers to it: new pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Bytes, weakref.ref[Bytes]]] = []

    def fill(self, ticket: Ticket, size: int, read: Callable[[Bytes], object]) -> tuple[Bytes, list[int]]:
        """Have ``read`` fill the memory of a version in parts of ``size`` bytes. Returns the memory and the tensors'
        fingerprints, for :func:`assemble_snapshot`."""
        nbytes = ticket.table.nbytes
        free = [block for block, view in self._blocks if view() is None and len(block) == nbytes]
        self._blocks = [(block, view) for block, view in self._blocks if view() is not None]
        block = free[0] if free else np.empty(nbytes, dtype=np.uint8)
        flat = np.frombuffer(block.data, dtype=np.uint8)  # the base of all slices, which numpy would make the block
        self._blocks.append((block, weakref.ref(flat)))
        tally = CrcTally(ticket.table)
        for start, stop in bucket_spans(ticket.table, size):
            read(flat[start:stop])
            tally.update(flat, 0, stop)
        return flat, tally.crcs


def _reserve(descriptor: int, start: int, stop: int) -> None:
    """Allocate a part of an open file: without its space, a store into a mapping would kill the process. Raises
    WeightSyncError if no space is left."""
    try:
        os.posix_fallocate(descriptor, start, stop - start)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        disk = os.fstatvfs(descriptor)
        free = disk.f_bavail * disk.f_frsize
        raise WeightSyncError(f"no space left for weights: {stop - start:,} bytes needed, {free:,} free") from error


def seal_offset(table: WeightTable) -> int:
    return HEAD_BYTES + -(-table.nbytes // ALIGN) * ALIGN


class WeightFile:
    """A version in memory, which another version with the same table may overwrite."""

    def __init__(self, table: WeightTable) -> None:
        self._descriptor = os.memfd_create("dlrover-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.table, self._nbytes, self._size = table, table.nbytes, seal_offset(table) + Seal.size(table)
        os.ftruncate(self._descriptor, self._size)
        _reserve(self._descriptor, 0, HEAD_BYTES)
        self._map = _map(self._descriptor, self._size, mmap.ACCESS_WRITE)
        self.pages = HostPages(self._map)
        self._progress: npt.NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64, count=1)
        self._data: Bytes = np.frombuffer(self._map, dtype=np.uint8, count=self._nbytes, offset=HEAD_BYTES)

    def publish(self, progress: int) -> None:
        """Tell readers how far the data is written."""
        self._progress[0] = progress  # one store of eight bytes, which no reader sees half done

    def reserve(self) -> None:
        """Allocate the whole file, which takes a second per GB or more."""
        if os.fstat(self._descriptor).st_blocks * 512 < self._size:
            _reserve(self._descriptor, 0, self._size)

    def write(self, ticket: Ticket, pieces: Pieces) -> Seal:
        """Copy pieces, offset and bytes in order, and seal them; readers may follow."""
        self.reserve()
        tally = CrcTally(self.table)
        for stop in stream_to_host(self._data, self.pages, pieces):
            tally.update(self._data, 0, stop)
            self.publish(stop)
        seal = Seal.of(ticket, tally.crcs)
        self._finish(seal.pack())
        return seal

    def fill(self, size: int, read: Callable[[Bytes], object], read_seal: Callable[[], bytes]) -> list[int]:
        """Have ``read`` fill the data in parts of ``size`` bytes, which may come slowly: each part is allocated just
        before it is read, and published once it is there. Returns the CRCs of the tensors."""
        tally = CrcTally(self.table)
        for start, stop in bucket_spans(self.table, size):
            _reserve(self._descriptor, HEAD_BYTES + start, HEAD_BYTES + stop)
            read(self._data[start:stop])
            tally.update(self._data, 0, stop)
            self.publish(stop)
        _reserve(self._descriptor, HEAD_BYTES + self._nbytes, self._size)
        self._finish(read_seal())
        return tally.crcs

    def _finish(self, packed_seal: bytes) -> None:
        self._map[seal_offset(self.table) :] = packed_seal
        self.publish(self._nbytes + 1)

    def clear(self) -> None:
        self.publish(0)

    def lend(self) -> tuple[int, WeightTable] | None:
        """Return a descriptor of the file, locked against writers, and its table; None if a writer has it."""
        descriptor = self._open(fcntl.LOCK_SH)
        return None if descriptor is None else (descriptor, self.table)

    def is_open(self) -> bool:
        descriptor = self._open(fcntl.LOCK_EX)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def _open(self, lock: int) -> int | None:
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor


class DeviceBuffer:
    """Memory on a device for the tensors of ``table``; zeros between them."""

    seal: Seal  # once it is written

    def __init__(self, memory: DeviceMemory, owner: str, table: WeightTable) -> None:
        self.id, self.table, self.readers, self._lock = uuid4().hex, table, 0, threading.Lock()
        nbytes = -(-table.nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self._descriptor: int | None = None
        if torch.device(memory.device).type == "cuda":
            self.flat = memory.allocate(owner, "buffer", (nbytes,), torch.uint8)
            return
        memory.require(owner, "buffer", nbytes)
        self._descriptor = os.memfd_create("dlrover-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        os.posix_fallocate(self._descriptor, 0, nbytes)
        self.flat = map_tensor(self._descriptor)
        memory.hold(owner, "buffer", [self.flat])

    def clear(self) -> None:
        """Do nothing: a buffer is not lent while it is written."""

    def is_open(self) -> bool:
        return self.readers > 0

    def lend(self) -> "DeviceBuffer":
        with self._lock:
            self.readers += 1
        return self

    def give_back(self) -> None:
        with self._lock:
            self.readers -= 1

    def handle(self) -> Any:
        """Return a handle with which another process can open the memory once."""
        return reduce_tensor(self.flat) if self._descriptor is None else f"/proc/{os.getpid()}/fd/{self._descriptor}"


def map_tensor(descriptor: int) -> Any:
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


class MappedWeights:
    """A receiver's view of a sender's pages, which no version overwrites while a view of ``flat`` lives. ``descriptor``
    has a shared lock on the file and is closed with the last view of ``flat``. ``maps`` keeps earlier mappings by
    inode, since a new one costs as much as a copy."""

    def __init__(self, descriptor: int, table: WeightTable, maps: dict[int, HostPages]) -> None:
        self._descriptor, self._seal_at = descriptor, seal_offset(table)
        self._size = self._seal_at + Seal.size(table)
        self._check_length()
        inode = os.fstat(descriptor).st_ino
        pages = maps.pop(inode, None)
        if pages is None or len(pages.mapping) != self._size:
            pages = HostPages(_map(descriptor, self._size, mmap.ACCESS_READ), read_only=True)
        maps[inode] = pages  # as the last: the least recently used mapping is dropped first
        while len(maps) > _CACHED_MAPS:
            del maps[next(iter(maps))]
        self._pages = pages
        self._progress: npt.NDArray[np.uint64] = np.frombuffer(pages.mapping, dtype=np.uint64, count=1)
        self.flat: Bytes = np.frombuffer(pages.mapping, dtype=np.uint8, count=table.nbytes, offset=HEAD_BYTES)
        weakref.finalize(self.flat, os.close, descriptor)

    def _check_length(self) -> None:
        nbytes = os.fstat(self._descriptor).st_size
        if nbytes != self._size:
            raise WeightSyncError(f"a sender's file is truncated: {nbytes:,} of {self._size:,} bytes")

    def progress(self) -> int:
        self._check_length()  # reading a page beyond the end would kill this process
        return int(self._progress[0])

    def snapshot(self, ticket: Ticket, crcs: Sequence[int]) -> WeightSnapshot:
        seal, path = Seal.unpack(self._pages.mapping[self._seal_at :]), f"/proc/{os.getpid()}/fd/{self._descriptor}"
        snapshot = assemble_snapshot(ticket, self.flat, crcs, seal, path, HEAD_BYTES)
        return replace(snapshot, lock_pages=self._pages.lock)


def _map(descriptor: int, size: int, access: int) -> mmap.mmap:
    flags = os.O_RDONLY if access == mmap.ACCESS_READ else os.O_RDWR
    # Opened again: the mapping keeps its open file, and would keep the lock of the descriptor.
    reopened = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
    try:
        return mmap.mmap(reopened, size, access=access)
    finally:
        os.close(reopened)
