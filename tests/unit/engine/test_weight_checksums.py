# SPDX-License-Identifier: Apache-2.0
"""Fingerprints are those of whole tensors, however the bytes come and however many threads read them."""

import os
import zlib

import numpy as np
import pytest

from dlrover.python.rl.engine.weight_sync import checksums
from dlrover.python.rl.engine.weight_sync.base import TensorEntry, WeightTable
from dlrover.python.rl.engine.weight_sync.checksums import CrcTally

SIZES = (100, 0, 40_000, 64, 9_000)


@pytest.mark.parametrize("cores", [1, 32])
@pytest.mark.parametrize("step", [1_000, 7_777, 10**6])
def test_windows_of_any_size_and_any_number_of_threads_give_the_same(monkeypatch, cores, step):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(checksums, "_PART", 1024)
    table = WeightTable(tuple(TensorEntry(f"w{number}", "uint8", (size,)) for number, size in enumerate(SIZES)))
    data = np.random.default_rng(0).integers(0, 256, table.nbytes, dtype=np.uint8)
    tally = CrcTally(table)
    for start in range(0, table.nbytes, step):
        stop = min(start + step, table.nbytes)
        tally.update(data[start:stop], start, stop)
    assert tally.crcs == [zlib.crc32(data[start:stop].tobytes()) for start, stop in table.spans()]
