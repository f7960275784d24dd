# SPDX-License-Identifier: Apache-2.0
"""Snapshots: what is sent is what arrives, or it is refused by name."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot, take_snapshot, verify_snapshot

NAMED = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 5),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in NAMED.items()}


def snapshot(version: int = 1) -> WeightSnapshot:
    return take_snapshot(NAMED.items(), version)


def renamed(source: WeightSnapshot, old: str, new: str) -> WeightSnapshot:
    fields = ("buffers", "shapes", "dtypes", "fingerprints")
    moved = {
        field: {(new if name == old else name): value for name, value in getattr(source, field).items()}
        for field in fields
    }
    return dataclasses.replace(source, **moved)


def test_every_dtype_and_shape_comes_back_equal():
    sent = snapshot()
    for name, tensor in NAMED.items():
        received = sent.tensor(name)
        assert received.dtype == tensor.dtype
        assert torch.equal(received, tensor)
    assert sent.nbytes == 12 * 4 + 2 * 2 + 8


def test_a_snapshot_is_a_copy():
    source = torch.zeros(3)
    sent = take_snapshot([("w", source)], 0)
    source.fill_(9.0)
    assert torch.equal(sent.tensor("w"), torch.zeros(3))


def test_reading_read_only_bytes_neither_copies_nor_warns():
    big = take_snapshot([("w", torch.ones(1 << 20))], 0)
    big.buffers["w"].flags.writeable = False
    tracemalloc.start()
    received = big.tensor("w")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert received.data_ptr() == big.buffers["w"].ctypes.data
    assert peak < 1 << 20


def test_a_stamp_is_the_same_for_the_same_bits_alone():
    stamp = snapshot(3).stamp
    assert stamp == snapshot(3).stamp
    assert str(stamp) == f"version 3 ({stamp.fingerprint})"
    changed = dict(NAMED, half=torch.tensor([1.5, -2.5], dtype=torch.bfloat16))
    reshaped = dict(NAMED, embed=NAMED["embed"].reshape(3, 4))
    others = [
        snapshot(4).stamp,
        take_snapshot(changed.items(), 3).stamp,
        take_snapshot(reshaped.items(), 3).stamp,
        renamed(snapshot(3), "embed", "embedd").stamp,
    ]
    assert len({stamp, *others}) == 5
    assert {other.fingerprint for other in others[1:]} & {stamp.fingerprint} == set()
    assert take_snapshot(reversed(NAMED.items()), 3).stamp == stamp


@pytest.mark.parametrize("field", ["shapes", "dtypes", "fingerprints"])
def test_a_cut_snapshot_names_the_tensor(field):
    whole = snapshot()
    kept = {name: value for name, value in getattr(whole, field).items() if name != "half"}
    with pytest.raises(WeightSyncError, match="'half' has no shape, dtype or fingerprint"):
        verify_snapshot(dataclasses.replace(whole, **{field: kept}), SHAPES, serving=0)


def test_an_intact_snapshot_passes():
    verify_snapshot(snapshot(), SHAPES, serving=1)


@pytest.mark.feature(103)
def test_missing_and_unknown_names_are_listed_with_the_nearest():
    with pytest.raises(WeightSyncError) as refused:
        verify_snapshot(renamed(snapshot(), "embed", "embedd"), SHAPES, serving=0)
    assert "'embed' is missing" in str(refused.value)
    assert "'embedd' is unknown" in str(refused.value)
    assert "embed" in str(refused.value).split("'embedd' is unknown")[1]


def test_another_shape_is_named():
    with pytest.raises(WeightSyncError, match=r"'embed' has shape \(4, 3\), not \(3, 4\)"):
        verify_snapshot(snapshot(), {**SHAPES, "embed": (3, 4)}, serving=0)


def test_one_flipped_bit_is_named():
    sent = snapshot()
    sent.buffers["half"][0] ^= 1
    with pytest.raises(WeightSyncError, match="'half' does not match its fingerprint"):
        verify_snapshot(sent, SHAPES, serving=0)


def test_cut_bytes_are_named():
    sent = snapshot()
    cut = dataclasses.replace(sent, buffers={**sent.buffers, "embed": sent.buffers["embed"][:-4]})
    with pytest.raises(WeightSyncError, match="'embed' has 44 bytes"):
        verify_snapshot(cut, SHAPES, serving=0)


@pytest.mark.feature(104)
def test_an_older_version_is_refused_and_the_same_one_is_not():
    verify_snapshot(snapshot(version=5), SHAPES, serving=5)
    with pytest.raises(WeightSyncError, match="version 4 is older than 5"):
        verify_snapshot(snapshot(version=4), SHAPES, serving=5)
    verify_snapshot(snapshot(version=4), SHAPES, serving=-1)


def test_all_faults_are_reported_at_once():
    sent = renamed(snapshot(), "scalar", "other")
    sent.buffers["embed"][:] = np.uint8(3)
    with pytest.raises(WeightSyncError) as refused:
        verify_snapshot(sent, SHAPES, serving=2)
    for part in ("'scalar' is missing", "'other' is unknown", "'embed' does not match", "older than 2"):
        assert part in str(refused.value)
