# SPDX-License-Identifier: Apache-2.0
"""Whatever way weights take, they arrive whole, the same, and under the fingerprint that they were sent with."""

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import OutOfDeviceMemory, WeightSyncError
from dlrover.python.rl.engine.api.weights import verify_snapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, WeightTable
from dlrover.python.rl.engine.weight_sync.disk import DiskTransport
from tests.support.sync_sides import (
    KINDS,
    LATEST_S,
    PATIENT,
    WAITING,
    ToySource,
    Wire,
    equal,
    forged,
    toy_weights,
    transport,
)

each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def wire(kind, tmp_path):
    wire = Wire(kind, tmp_path)
    yield wire
    wire.close()


@each_kind
def test_every_dtype_and_shape_arrives_bit_for_bit(wire):
    weights = toy_weights()
    stamp, (received,) = wire.sync(ToySource(weights, version=3))
    assert equal(received, weights)
    assert received.version == 3
    assert received.stamp == stamp


@each_kind
def test_all_transports_give_the_fingerprint_of_a_snapshot_but_the_one_on_the_device(wire, kind):
    source = ToySource(toy_weights(), version=3)
    stamp = wire.sync(source)[1][0].stamp
    assert stamp == source.stamp(kind)
    assert (stamp == source.stamp()) == (kind != "cuda_ipc")


@pytest.mark.feature(105)
@each_kind
@pytest.mark.parametrize("bucket_bytes", [1 << 10, 10_000, 1 << 20])
def test_the_size_of_the_buckets_changes_nothing(kind, tmp_path, bucket_bytes):
    wire = Wire(kind, tmp_path, settings=replace(PATIENT, bucket_bytes=bucket_bytes))
    weights = toy_weights()
    _, (received,) = wire.sync(ToySource(weights, version=1))
    assert equal(received, weights)
    wire.close()


@each_kind
def test_versions_follow_each_other_and_earlier_ones_stay_as_they_were(wire):
    received = {}
    for version in range(1, 6):
        received[version] = wire.sync(ToySource(toy_weights(version), version))[1][0]
        for earlier, snapshot in received.items():
            assert equal(snapshot, toy_weights(earlier))


@each_kind
def test_memory_is_used_again_once_nobody_refers_to_it(wire):
    places = set()
    for version in range(8):
        _, (received,) = wire.sync(ToySource(toy_weights(version), version))
        buffer = received.buffers["long"]
        places.add(buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data_ptr())
        del buffer
        del received
    assert len(places) <= 3


@pytest.mark.feature(101)
@each_kind
def test_no_byte_of_a_weight_is_in_the_ticket(wire, kind):
    weights = {f"layers.{number}.weight": torch.full((512, 64), float(number)) for number in range(40)}
    source = ToySource(weights, version=1)
    ticket = wire.source.offer(source)
    size = len(pickle.dumps(ticket))
    assert size < 100 * len(weights) + 1000
    larger = {name: tensor.repeat(4, 1) for name, tensor in weights.items()}
    other = Wire(kind, wire.folder / "larger")
    assert abs(len(pickle.dumps(other.source.offer(ToySource(larger, version=1)))) - size) < 100
    other.close()


@each_kind
def test_a_ticket_survives_the_way_through_a_trainer(wire):
    ticket = wire.source.offer(ToySource(toy_weights(), version=1))
    assert pickle.loads(pickle.dumps(ticket)) == ticket


@each_kind
def test_the_names_are_asked_for_once_and_a_ticket_costs_no_round_after_that(wire):
    source = ToySource(toy_weights(), version=1)
    wire.sync(source)
    assert source.rounds == 2
    wire.sync(source)
    assert source.rounds == 3


@pytest.mark.feature(103)
@each_kind
def test_a_renamed_tensor_is_an_error_that_names_both_on_either_side_at_once(wire):
    source = ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    source.weights = {("embedding" if name == "norm" else name): each for name, each in source.weights.items()}
    began_s = time.monotonic()
    sent, received = wire.attempt(ticket, source)
    assert time.monotonic() - began_s < PATIENT.timeout_s / 2
    assert isinstance(received, WeightSyncError)
    with pytest.raises(WeightSyncError, match=r"'embedding' float32\[3\] where it offered 'norm' float32\[3\]"):
        raise sent


@pytest.mark.feature(103)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("norm"), "has nothing where it offered 'norm'"),
        (lambda weights: weights.update(more=torch.zeros(2)), r"has 'more' float32\[2\] where it offered nothing"),
        (
            lambda weights: weights.update(norm=torch.zeros(4)),
            r"'norm' float32\[4\] where it offered 'norm' float32\[3\]",
        ),
        (
            lambda weights: weights.update(norm=weights["norm"].double()),
            r"'norm' float64\[3\] where it offered 'norm' float32",
        ),
    ],
)
def test_a_source_that_changes_after_its_offer_is_an_error_and_can_offer_anew(tmp_path, change, message):
    wire = Wire("disk", tmp_path)
    source = ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    change(source.weights)
    with pytest.raises(WeightSyncError, match=message):
        wire.source.send(ticket, source)
    with pytest.raises(WeightSyncError, match=r"ACTOR\[0\] \(process \d+\) has ended before it was written"):
        wire.sinks[0].receive(ticket)
    assert equal(wire.sync(source)[1][0], source.weights)
    wire.close()


@pytest.mark.feature(103)
def test_a_sink_of_another_model_names_what_does_not_fit(tmp_path):
    wire = Wire("pull", tmp_path)
    _, (received,) = wire.sync(ToySource(toy_weights(), version=1))
    shapes = {name: tuple(tensor.shape) for name, tensor in toy_weights().items()}
    expected = {("embedd" if name == "embed" else name): shape for name, shape in shapes.items()}
    with pytest.raises(WeightSyncError, match=r"'embedd' is missing; 'embed' is unknown; did you mean 'embedd'\?"):
        verify_snapshot(received, expected, serving=0)
    wire.close()


@pytest.mark.feature(104)
@each_kind
def test_what_the_sender_seals_is_compared_with_the_ticket(wire, kind, monkeypatch):
    source = ToySource(toy_weights(), version=3)
    fingerprint = source.stamp(kind).fingerprint
    ticket = wire.source.offer(source)
    forged(monkeypatch, 4)
    sent, received = wire.attempt(ticket, source)
    assert sent.version == 4
    assert isinstance(received, WeightSyncError)
    assert f"version 4 ({fingerprint}) was sent, but the ticket describes version 3 ({fingerprint})" in str(received)


@pytest.mark.feature(104)
@each_kind
def test_a_ticket_whose_version_or_names_are_others_than_the_senders_is_refused(wire):
    source = ToySource(toy_weights(), version=3)
    ticket = wire.source.offer(source)
    entries = ticket.table.entries
    renamed = WeightTable((entries[0]._replace(name="other"), *entries[1:]))
    for wrong in (replace(ticket, version=4), replace(ticket, table=renamed)):
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(wire.source.send, ticket, source)
            if wire.kind not in WAITING:
                sending.result(LATEST_S)
            with pytest.raises(WeightSyncError, match=r"version 3 \([0-9a-f]{16}\) was sent"):
                wire.sinks[0].receive(wrong)
            sending.result(LATEST_S)


@pytest.mark.feature(104)
@each_kind
def test_a_source_that_has_gone_on_is_an_error_with_both_versions(wire):
    source = ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    source.version = 2
    with pytest.raises(WeightSyncError, match="version 1 was offered, and the source is at 2"):
        wire.source.send(ticket, source)


@each_kind
def test_ranks_that_do_not_lead_take_part_in_gathering_and_send_nothing(wire, kind, tmp_path):
    follower = transport(kind, tmp_path / "none", replace(PATIENT, is_leader=False))
    source = ToySource(toy_weights(), version=1)
    taken = []
    source.halt = taken.append
    follower.offer(source)
    assert follower.send(wire.source.offer(ToySource(toy_weights(), version=1)), source) is None
    assert taken == list(range(len(source.weights)))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_several_sinks_get_the_same(kind, tmp_path):
    wire = Wire(kind, tmp_path, sinks=2)
    for version in (1, 2):
        source = ToySource(toy_weights(version), version)
        stamp, received = wire.sync(source)
        assert [each.stamp for each in received] == [stamp, stamp]
        assert all(equal(each, source.weights) for each in received)
    wire.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("pull")])
def test_a_leader_that_fails_still_takes_its_part_in_the_gathering(kind, tmp_path):
    sender = transport(kind, tmp_path, replace(PATIENT, timeout_s=0.5, memory=DeviceMemory(capacity=4096)))
    source = ToySource(toy_weights(), version=1)
    taken = []
    source.halt = taken.append
    ticket = sender.offer(source)
    (tmp_path / "ACTOR.sender").mkdir()  # no file can be there; no receiver comes; the device has a bucket's room
    with pytest.raises((WeightSyncError, OSError, OutOfDeviceMemory)):
        sender.send(ticket, source)
    assert taken == list(range(len(source.weights)))
    sender.close()


@pytest.mark.parametrize("kind", WAITING)
def test_all_that_a_device_holds_for_a_sync_is_a_bucket(kind, tmp_path):
    """A host stands in for the devices; they have no room for the weights."""
    bucket = 8192
    source, sink = (DeviceMemory(capacity=bucket) for _ in range(2))
    settings = replace(PATIENT, bucket_bytes=bucket)
    wire = Wire(kind, tmp_path, settings=replace(settings, memory=source))
    wire.sinks = [transport(kind, tmp_path, replace(settings, memory=sink))]
    toy = ToySource(toy_weights(), version=1)
    _, (received,) = wire.sync(toy)
    assert received.nbytes > 8 * bucket
    assert (source.peak, sink.peak) == (bucket, bucket if kind == "broadcast" else 0)
    wire.close()
    deadline_s = time.monotonic() + 5.0
    while source.total() + sink.total():  # gloo's own thread lets go of what it has sent
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_of_a_rollout_that_splits_its_matrices_takes_its_part(kind, tmp_path):
    """Two ranks: the first matrix by columns of outputs, the second by columns of inputs; their sum is the whole's."""
    generator = torch.Generator().manual_seed(0)
    up, down, x = (torch.randn(*shape, generator=generator) for shape in ((24, 16), (16, 24), (5, 16)))
    wire = Wire(kind, tmp_path, sinks=2)
    stamp, received = wire.sync(ToySource({"up": up, "down": down}, version=1))
    parts = [
        (x @ each.tensor("up").chunk(2, 0)[rank].T).relu() @ each.tensor("down").chunk(2, 1)[rank].T
        for rank, each in enumerate(received)
    ]
    assert torch.allclose(sum(parts), (x @ up.T).relu() @ down.T, atol=1e-5)
    assert [each.stamp for each in received] == [stamp, stamp]
    wire.close()


def test_the_default_size_of_a_bucket_is_that_of_a_cache_or_of_a_devices_copy():
    assert SyncSettings().bucket == 1 << 20
    assert SyncSettings(device="cuda:1").bucket == 1 << 26
    assert SyncSettings(device="cuda:1", bucket_bytes=1000).bucket == 1024


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_after_the_end(kind, tmp_path):
    wire = Wire(kind, tmp_path)
    for version in range(3):
        wire.sync(ToySource(toy_weights(version), version))
    wire.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_for_a_sender_that_never_begins_has_an_end(kind, tmp_path):
    hurried = replace(PATIENT, timeout_s=0.3)
    sender, sink = (transport(kind, tmp_path, replace(hurried, name=name)) for name in ("ACTOR[0]", "me"))
    ticket = sender.offer(ToySource(toy_weights(), version=9))
    with pytest.raises(WeightSyncError, match=r"version 9 from ACTOR\[0\]"):
        sink.receive(ticket)
    sender.close()


def test_a_received_snapshot_is_checked_and_forgets_that_on_its_way_to_another_process(tmp_path):
    wire = Wire("pull", tmp_path)
    _, (received,) = wire.sync(ToySource(toy_weights(), version=1))
    copy = pickle.loads(pickle.dumps(received))
    assert (received.checked, copy.checked) == (True, False)
    copy.buffers["norm"].flags.writeable = True
    copy.buffers["norm"][0] ^= 1
    with pytest.raises(WeightSyncError, match="'norm' does not match"):
        verify_snapshot(copy, {name: tuple(tensor.shape) for name, tensor in toy_weights().items()}, serving=0)
    wire.close()


def test_a_mapped_snapshot_is_shared_and_cannot_be_written(tmp_path):
    wire = Wire("pull", tmp_path, sinks=2)
    _, received = wire.sync(ToySource(toy_weights(), version=1))
    for each in received:
        with pytest.raises(ValueError, match="read-only"):
            each.buffers["norm"][0] = np.uint8(0)
    wire.close()


def test_runs_that_share_a_folder_leave_each_other_their_weights(tmp_path):
    sides = [DiskTransport(SyncSettings(folder=tmp_path, channel=f"ACTOR-{run}")) for run in ("one", "two")]
    source = ToySource(toy_weights(), version=1)
    tickets = [side.offer(source) for side in sides]
    for side, ticket in zip(sides, tickets, strict=True):
        side.send(ticket, source)
    assert [side.receive(ticket).version for side, ticket in zip(sides, tickets, strict=True)] == [1, 1]
    sides[0].close()
    assert sides[1].receive(tickets[1]).version == 1
    (left,) = tmp_path.glob("*.weights")
    os.utime(left, (0, 0))  # of a run that was killed long ago
    sides[0].send(sides[0].offer(source), source)
    assert not left.exists() and len(list(tmp_path.glob("*.weights"))) == 1


@pytest.mark.parametrize("name", ["", "A.B", "A/B"])
def test_names_that_would_meet_others_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a sender"):
        DiskTransport(SyncSettings(folder=tmp_path, channel=name))


@pytest.mark.feature(102)
@pytest.mark.needs("two cuda devices")
def test_nccl_gives_the_same_weights():
    source_side, sink_side = (SyncSettings(device=f"cuda:{number}", who=str(number)) for number in (0, 1))
    wire = Wire("broadcast", None, settings=source_side)
    wire.sinks = [transport("broadcast", None, sink_side)]
    weights = {name: tensor.to("cuda:0") for name, tensor in toy_weights().items()}
    source = ToySource(weights, version=1)
    assert wire.sync(source)[1][0].stamp == source.stamp()
