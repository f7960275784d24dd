# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of weights that pass: CRC-32 of each tensor, by several threads where there are cores for them; and of
weights that stay on a device, which computes sums of their blocks.

A block's sum is that of its 32-bit words, each times a random odd number of 64 bits of its own, modulo 2^64: every
change of one word changes it, and others do but for one in 2^32 or fewer. A tensor's fingerprint is the CRC-32 of the
sums of all blocks that it lies in.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32, crc32_combine

from dlrover.python.rl.engine.weight_sync.base import WeightTable

_PART = 1 << 22
"""Bytes for one thread: a third of a millisecond."""

_CORES_FOR_A_THREAD, _MOST_THREADS = 4, 4  # the receivers of a node compute at the same time


class CrcTally:
    """CRC-32 of each tensor of a table, updated while the passing bytes are in the cache."""

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
        for tensor, part, crc in zip(tensors, parts, _checksums(parts), strict=True):
            self.crcs[tensor] = crc32_combine(self.crcs[tensor], crc, len(part))


def _checksums(parts: Sequence[memoryview]) -> Iterator[int]:
    if sum(map(len, parts)) < 2 * _PART:
        return map(crc32, parts)
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) // _CORES_FOR_A_THREAD)
    if threads < 2:
        return map(crc32, parts)
    return _pool(os.getpid(), threads).map(crc32, parts)  # waits: for a computation


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Of this process: one that was forked has none of its parent's threads."""
    return ThreadPoolExecutor(threads, "dlrover-checksums")


BLOCK_BYTES = 1 << 14
_AT_ONCE = 1 << 24
"""Words whose products are on the device at a time."""


def device_fingerprints(table: WeightTable, flat: Any) -> list[int]:
    """Of each tensor of ``table`` in ``flat``: ``uint8`` on any device, whole blocks with zeros between the tensors."""
    factors = _factors(flat.device)
    parts = flat.view(torch.int32).split(_AT_ONCE)
    sums = torch.cat([(part.view(-1, len(factors)) * factors).sum(dim=-1) for part in parts]).cpu().numpy()
    return [crc32(sums[start // BLOCK_BYTES : -(-stop // BLOCK_BYTES)].data) for start, stop in table.spans()]


@cache
def _factors(device: torch.device) -> Any:
    random = np.random.Generator(np.random.Philox(key=1)).integers(-(1 << 63), 1 << 63, BLOCK_BYTES // 4)
    return torch.from_numpy(random | 1).to(device)
