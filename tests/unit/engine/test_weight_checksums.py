# SPDX-License-Identifier: Apache-2.0
"""Fingerprints are those of whole tensors, however the bytes come and however many threads read them."""

import os
import zlib

import numpy as np
import pytest
import torch

from dlrover.python.rl.engine.weight_sync import buckets
from dlrover.python.rl.engine.weight_sync.base import TensorEntry, WeightTable
from dlrover.python.rl.engine.weight_sync.buckets import BLOCK_BYTES, CrcTally, device_fingerprints

SIZES = (100, 0, 40_000, 64, 9_000)


@pytest.mark.parametrize("cores", [1, 32])
@pytest.mark.parametrize("step", [1_000, 7_777, 10**6])
def test_windows_of_any_size_and_any_number_of_threads_give_the_same(monkeypatch, cores, step):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(buckets, "_PART", 1024)
    table = WeightTable(tuple(TensorEntry(f"w{number}", "uint8", (size,)) for number, size in enumerate(SIZES)))
    data = np.random.default_rng(0).integers(0, 256, table.nbytes, dtype=np.uint8)
    tally = CrcTally(table)
    for start in range(0, table.nbytes, step):
        stop = min(start + step, table.nbytes)
        tally.update(data[start:stop], start, stop)
    assert tally.crcs == [zlib.crc32(data[start:stop].tobytes()) for start, stop in table.spans()]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs("cuda"))]


def laid_out(sizes, seed=0):
    table = WeightTable(tuple(TensorEntry(f"w{number}", "uint8", (size,)) for number, size in enumerate(sizes)))
    data = np.zeros(-(-table.nbytes // BLOCK_BYTES) * BLOCK_BYTES, dtype=np.uint8)
    for start, stop in table.spans():
        data[start:stop] = np.random.default_rng(seed).integers(0, 256, stop - start, dtype=np.uint8)
    return table, data


@pytest.mark.parametrize("device", DEVICES)
def test_fingerprints_on_a_device_are_those_of_the_plain_sums(device):
    table, data = laid_out((*SIZES, 70_000))
    factors = np.random.Generator(np.random.Philox(key=1)).integers(-(1 << 63), 1 << 63, BLOCK_BYTES // 4) | 1
    words = data.view("<i4").reshape(-1, BLOCK_BYTES // 4)
    sums = [sum(int(word) * int(factor) for word, factor in zip(row, factors, strict=True)) for row in words]
    wrapped = np.array([(each + (1 << 63)) % (1 << 64) - (1 << 63) for each in sums], dtype="<i8")
    spans = [(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) for start, stop in table.spans()]
    expected = [zlib.crc32(wrapped[first:last].tobytes()) for first, last in spans]
    assert device_fingerprints(table, torch.from_numpy(data).to(device)) == expected


@pytest.mark.parametrize("change", ["bit", "swap", "shift"])
def test_fingerprints_on_a_device_see_changes_of_bits_and_of_order(change):
    table, data = laid_out((200_000, 50_000))
    before = device_fingerprints(table, torch.from_numpy(data.copy()))
    if change == "bit":
        data[33_333] ^= 128
    elif change == "swap":
        data[400:404], data[804:808] = data[804:808].copy(), data[400:404].copy()
    else:
        data[:BLOCK_BYTES] = np.roll(data[:BLOCK_BYTES], 4)
    after = device_fingerprints(table, torch.from_numpy(data))
    assert after[0] != before[0] and after[1] == before[1]


def test_several_parts_on_a_device_give_the_fingerprints_of_one(monkeypatch):
    table, data = laid_out((200_000, 50_000))
    whole = device_fingerprints(table, torch.from_numpy(data))
    monkeypatch.setattr(buckets, "_AT_ONCE", 2 * BLOCK_BYTES // 4)
    assert device_fingerprints(table, torch.from_numpy(data)) == whole
