# SPDX-License-Identifier: Apache-2.0
"""Snapshots of weights, fingerprints of bytes that come in parts, and the choice of a transport."""

import inspect
import os
import threading
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot, take_snapshot, verify_snapshot
from dlrover.python.rl.engine.weight_sync import buckets, cuda_ipc
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, TensorEntry, WeightTable
from dlrover.python.rl.engine.weight_sync.buckets import BLOCK_BYTES, CrcTally, device_fingerprints
from dlrover.python.rl.engine.weight_sync.collective import BroadcastGroup
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.engine.weight_sync.transports import (
    check_collocation,
    make_transport,
    validate_transport,
)

NAMED = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 5),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in NAMED.items()}
FIELDS = ("shapes", "dtypes", "fingerprints")


def snapshot(version: int = 1) -> WeightSnapshot:
    return take_snapshot(NAMED.items(), version)


def renamed(source: WeightSnapshot, old: str, new: str) -> WeightSnapshot:
    fields = {name: getattr(source, name) for name in ("buffers", "shapes", "dtypes", "fingerprints")}
    renamed_fields = {
        field: {(new if name == old else name): value for name, value in values.items()}
        for field, values in fields.items()
    }
    return replace(source, **renamed_fields)


def without(field, name):
    sent = snapshot()
    return replace(sent, **{field: {key: value for key, value in getattr(sent, field).items() if key != name}})


def with_bytes(name, values, sent=None):
    sent = sent or snapshot()
    return replace(sent, buffers={**sent.buffers, name: values(sent.buffers[name])})


def test_snapshot_is_a_copy_with_each_dtype_and_shape():
    sources = {name: tensor.clone() for name, tensor in NAMED.items()}
    sent = take_snapshot(sources.items(), 1)
    for tensor in sources.values():
        tensor.zero_()
    for name, tensor in NAMED.items():
        received = sent.tensor(name)
        assert received.dtype == tensor.dtype
        assert torch.equal(received, tensor)
    assert sent.nbytes == 12 * 4 + 2 * 2 + 8


def test_read_only_bytes_are_not_copied():
    big = take_snapshot([("w", torch.ones(1000))], 0)
    big.buffers["w"].flags.writeable = False
    assert big.tensor("w").data_ptr() == big.buffers["w"].ctypes.data


def test_stamp_is_equal_for_equal_bits_only():
    stamp = snapshot(3).stamp
    assert stamp == snapshot(3).stamp
    assert str(stamp) == f"version 3 ({stamp.fingerprint})"
    changed = dict(NAMED, half=torch.tensor([1.5, -2.5], dtype=torch.bfloat16))
    reshaped = dict(NAMED, embed=NAMED["embed"].reshape(3, 4))
    stamps = [
        snapshot(4).stamp,
        take_snapshot(changed.items(), 3).stamp,
        take_snapshot(reshaped.items(), 3).stamp,
        renamed(snapshot(3), "embed", "embedd").stamp,
    ]
    assert len({stamp, *stamps}) == 5
    assert stamp.fingerprint not in {each.fingerprint for each in stamps[1:]}
    assert take_snapshot(reversed(NAMED.items()), 3).stamp == stamp


@pytest.mark.feature(103, 104)
@pytest.mark.parametrize(
    ("sent", "shapes", "serving", "messages"),
    [
        *((without(field, "half"), {}, 0, ["'half' has no shape, dtype or fingerprint"]) for field in FIELDS),
        (renamed(snapshot(), "embed", "embedd"), {}, 0, ["'embed' is missing", "'embedd' is unknown; did you mean"]),
        (snapshot(), {"embed": (3, 4)}, 0, ["'embed' has shape (4, 3), not (3, 4)"]),
        (with_bytes("half", lambda values: values ^ 1), {}, 0, ["'half' does not match its fingerprint"]),
        (with_bytes("embed", lambda values: values[:-4]), {}, 0, ["'embed' has 44 bytes"]),
        (snapshot(version=4), {}, 5, ["version 4 is older than 5"]),
        (
            with_bytes("embed", np.zeros_like, renamed(snapshot(), "scalar", "other")),
            {},
            2,
            ["'scalar' is missing", "'other' is unknown", "'embed' does not match", "older than 2"],
        ),
    ],
)
def test_faulty_snapshot_is_refused_with_all_faults(sent, shapes, serving, messages):
    with pytest.raises(WeightSyncError) as refused:
        verify_snapshot(sent, {**SHAPES, **shapes}, serving=serving)
    assert [message for message in messages if message not in str(refused.value)] == []


@pytest.mark.parametrize("serving", [-1, 0, 1])
def test_intact_snapshot_of_no_older_version_passes(serving):
    verify_snapshot(snapshot(), SHAPES, serving=serving)


# -- fingerprints of bytes that come in parts -------------------------------------------------------------------------
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs("cuda"))]
SIZES = (100, 0, 40_000, 64, 9_000)


def laid_out(sizes, seed=0):
    table = WeightTable(tuple(TensorEntry(f"w{number}", "uint8", (size,)) for number, size in enumerate(sizes)))
    data = np.zeros(-(-table.nbytes // BLOCK_BYTES) * BLOCK_BYTES, dtype=np.uint8)
    for start, stop in table.spans():
        data[start:stop] = np.random.default_rng(seed).integers(0, 256, stop - start, dtype=np.uint8)
    return table, data


@pytest.mark.parametrize("cores", [1, 32])
@pytest.mark.parametrize("step", [1_000, 7_777, 10**6])
def test_checksums_match_whole_tensors(monkeypatch, cores, step):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(buckets, "_PART", 1024)
    table, data = laid_out(SIZES)
    tally = CrcTally(table)
    for start in range(0, table.nbytes, step):
        stop = min(start + step, table.nbytes)
        tally.update(data[start:stop], start, stop)
    assert tally.crcs == [zlib.crc32(data[start:stop].tobytes()) for start, stop in table.spans()]


@pytest.mark.parametrize("device", DEVICES)
def test_device_fingerprints_match_plain_sums(device):
    table, data = laid_out((*SIZES, 70_000))
    factors = np.random.Generator(np.random.Philox(key=1)).integers(-(1 << 63), 1 << 63, BLOCK_BYTES // 4) | 1
    words = data.view("<i4").reshape(-1, BLOCK_BYTES // 4)
    sums = [sum(int(word) * int(factor) for word, factor in zip(row, factors, strict=True)) for row in words]
    wrapped = np.array([(each + (1 << 63)) % (1 << 64) - (1 << 63) for each in sums], dtype="<i8")
    spans = [(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) for start, stop in table.spans()]
    expected = [zlib.crc32(wrapped[first:last].tobytes()) for first, last in spans]
    assert device_fingerprints(table, torch.from_numpy(data).to(device)) == expected


@pytest.mark.parametrize("change", ["bit", "swap", "shift"])
def test_device_fingerprints_see_changed_bits_and_order(change):
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


def test_device_fingerprints_of_parts_match_the_whole(monkeypatch):
    table, data = laid_out((200_000, 50_000))
    whole = device_fingerprints(table, torch.from_numpy(data))
    monkeypatch.setattr(buckets, "_AT_ONCE", 2 * BLOCK_BYTES // 4)
    assert device_fingerprints(table, torch.from_numpy(data)) == whole


class OwnTransport(PullTransport):
    waits_for_receivers = True


# -- the choice of a transport in a job's config ----------------------------------------------------------------------
OWN = f"{__name__}:OwnTransport"
TRANSPORT = "config.engine.weight_sync"
OPTIONS = f"{TRANSPORT}_options"


@pytest.mark.parametrize(
    ("name", "options", "device", "expected"),
    [
        ("auto", {}, "cpu", []),
        ("pull", {"timeout_s": 3.0}, "cuda", []),
        ("cuda_ipc", {}, "cuda", []),
        ("broadcast", {"receivers": 2}, "cpu", [f"{OPTIONS}.receivers: unknown key 'receivers'; known: "]),
        (OWN, {"timeout_s": 3.0}, "cpu", []),
        (OWN, {"receivers": 2}, "cpu", [f"{OPTIONS}.receivers: unknown key"]),
        ("brodcast", {}, "cpu", [f"{TRANSPORT}: no weight transport is called 'brodcast'; did you mean"]),
        ("nowhere:Transport", {}, "cpu", [f"{TRANSPORT}: module 'nowhere' cannot be imported"]),
        ("disk", {}, "cpu", [f"{TRANSPORT}: no weight transport is called 'disk'; there are auto, broadcast, "]),
        ("pull", {"folder": "x"}, "cpu", [f"{OPTIONS}.folder: unknown key 'folder'; known: bucket_bytes, timeout_s"]),
        ("brodcast", {"timeout_s": 0}, "cpu", [f"{OPTIONS}.timeout_s: input", f"{TRANSPORT}: no weight transport"]),
        ("pull", {"buckets": 2, "timeout_s": ""}, "cpu", [f"{OPTIONS}.timeout_s: in", f"{OPTIONS}.buckets: unknown"]),
        ("cuda_ipc", {}, "cpu", [f"{TRANSPORT}: 'cuda_ipc' needs engine.device cuda"]),
        ("broadcast", {}, "cuda:0", [f"{TRANSPORT}: 'broadcast' needs a device for each worker"]),
    ],
)
def test_impossible_transport_is_refused_with_its_key(name, options, device, expected):
    errors = [str(error) for error in validate_transport(name, options, device)]
    assert len(errors) == len(expected)
    assert all(error.startswith(start) for error, start in zip(errors, expected, strict=True)), errors


COLLOCATED, LOCAL = {"is_collocated": True}, {"is_collocated": False, "in_one_process": True, "receivers": 2}
APART = {"is_collocated": False}


@pytest.mark.parametrize(
    ("name", "device", "roles", "message"),
    [
        ("broadcast", "cuda:0", COLLOCATED, "engine.weight_sync 'broadcast' needs actor and rollout"),
        ("cuda_ipc", "cuda:0", APART, "engine.weight_sync 'cuda_ipc' needs actor and rollout"),
        ("broadcast", "cpu", LOCAL, "sends to 2 rollouts at once, .* leave out --local, or use 'pull'"),
    ],
)
def test_transport_misfitting_the_roles_is_refused(name, device, roles, message):
    with pytest.raises(EngineError, match=message):
        check_collocation(name, device, **roles)


@pytest.mark.parametrize(
    ("name", "device", "roles"),
    [
        ("broadcast", "cuda:0", APART),
        ("broadcast", "cpu", COLLOCATED),
        ("cuda_ipc", "cuda:0", COLLOCATED),
        ("broadcast", "cpu", {**LOCAL, "receivers": 1}),
        ("broadcast", "cpu", {**APART, "receivers": 2}),
        ("pull", "cpu", LOCAL),
        ("cuda_ipc", "cuda:0", {**LOCAL, **COLLOCATED}),
    ],
)
def test_transport_fits_the_roles(name, device, roles):
    check_collocation(name, device, **roles)


def test_transport_has_the_options_and_waits_for_receivers():
    settings = SyncSettings("ACTOR[0]", timeout_s=5.0, channel="ACTOR")
    options = {"bucket_bytes": 4096}
    assert make_transport("auto", {}, settings).settings == settings
    waiting = make_transport(OWN, options, replace(settings, receivers=3)).settings
    expected = replace(settings, bucket_bytes=4096, receivers=3, timeout_s=60.0)
    assert waiting == expected
    assert make_transport("pull", options, settings).settings.timeout_s == 5.0


# -- a broadcast by nccl, here by a stand-in --------------------------------------------------------------------------
def group(is_completed=lambda: True, exception=lambda: None, timeout_s=5.0, begin=lambda: None):
    work, aborted = SimpleNamespace(is_completed=is_completed, exception=exception), threading.Event()

    def broadcast(tensor, rank):
        begin()
        return work

    backend = SimpleNamespace(name=lambda: "nccl", broadcast=broadcast, abort=aborted.set)
    return BroadcastGroup("g", backend, timeout_s), aborted


def cannot_be_given():
    raise TypeError("Unregistered type: std::exception_ptr")


@pytest.mark.parametrize("exception", [lambda: None, cannot_be_given])
def test_complete_broadcast_has_arrived(exception):
    group(exception=exception)[0].broadcast(torch.zeros(1))


def test_failed_broadcast_is_an_error():
    broken, _ = group(exception=lambda: RuntimeError("NCCL error: remote process exited"))
    with pytest.raises(ConnectionError, match="nccl failed: NCCL error: remote process exited"):
        broken.broadcast(torch.zeros(1))


@pytest.mark.parametrize("returns", [True, False])
def test_broadcast_without_end_is_aborted(returns):
    """A rank is missing: work does not end, or the call does not return."""
    over = threading.Event()
    late, aborted = group(lambda: False, timeout_s=0.05, begin=(lambda: None) if returns else lambda: over.wait(60))
    with pytest.raises(ConnectionError, match="has not ended within 0.05 s"):
        late.broadcast(torch.zeros(1))
    over.set()
    late.leave()
    assert aborted.is_set()


def test_receiver_opens_memory_by_its_own_device_number():
    handle = (lambda *arguments: arguments, tuple("abcdef") + (0,) + tuple("hijklmno"))
    opened = cuda_ipc._open_memory(handle, "", ticket=None, device="cuda:3")
    assert opened == (*"abcdef", 3, *"hijklmno")
    assert list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device") == opened.index(3)
