# SPDX-License-Identifier: Apache-2.0
"""Weights that a device copies to the host by itself while the host reads those before them."""

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.weight_sync import buckets, pull
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.buckets import WeightFile, stream_to_host
from tests.support.sync_sides import ToySource, Wire, equal, toy_weights

CUDA = torch.device("cuda")
UNDER_WAY = 3000

needs_cuda = pytest.mark.needs("cuda")


class Pages:
    def lock(self, device):
        return True


class Piece:
    """Bytes of a device."""

    device = CUDA

    def __init__(self, value, size=1000):
        self.data = np.full(size, value, dtype=np.uint8)

    def __len__(self):
        return len(self.data)


class Arrival:
    """The event of a copy that takes until it is waited for."""

    def __init__(self, target, piece):
        self.copy, self.has_ended = lambda: np.copyto(target, piece.data), False

    def synchronize(self):
        self.copy()
        self.has_ended = True

    def query(self):
        return self.has_ended


@pytest.fixture
def arrivals(monkeypatch):
    copies = []

    def begin(target, piece):
        copies.append(Arrival(target, piece))
        return copies[-1]

    monkeypatch.setattr(buckets, "_begin_copy", begin)
    monkeypatch.setattr(buckets, "_UNDER_WAY", UNDER_WAY)
    return copies


def test_what_is_read_has_arrived_and_no_more_than_some_bytes_are_under_way(arrivals):
    target, pieces = np.zeros(10_000, dtype=np.uint8), [(1000 * number, Piece(number + 1)) for number in range(10)]
    read = 0
    for stop in stream_to_host(target, Pages(), iter(pieces)):
        assert target[read:stop].all()
        assert len(arrivals) * 1000 - stop <= UNDER_WAY
        read = stop
    assert read == 10_000 and target.tolist() == np.repeat(np.arange(1, 11), 1000).tolist()


def test_pieces_of_the_host_among_them_keep_the_order(arrivals):
    pieces = [(0, Piece(1)), (1000, Piece(2)), (2000, torch.full((500,), 3, dtype=torch.uint8)), (2500, Piece(4))]
    target = np.zeros(3500, dtype=np.uint8)
    for stop in stream_to_host(target, Pages(), iter(pieces)):
        assert target[:stop].all()
    assert target.tolist() == [1] * 1000 + [2] * 1000 + [3] * 500 + [4] * 1000


def test_a_source_that_fails_leaves_no_copy_under_way(arrivals):
    def pieces():
        yield 0, Piece(1)
        yield 1000, Piece(2)
        raise RuntimeError("the source has failed")

    with pytest.raises(RuntimeError, match="has failed"):
        list(stream_to_host(np.zeros(2000, dtype=np.uint8), Pages(), pieces()))
    assert [arrival.has_ended for arrival in arrivals] == [True, True]


def test_the_memory_is_there_before_a_receiver_waits_for_it(tmp_path, monkeypatch):
    copies = []

    class Counted(WeightFile):
        def __init__(self, *arguments):
            copies.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(pull, "WeightFile", Counted)
    wire = Wire("pull", tmp_path)
    for version, files in ((1, 1), (2, 2), (3, 2), (4, 2)):
        source = ToySource(toy_weights(version), version)
        ticket = wire.source.offer(source)
        assert len(copies) == files
        wire.attempt(ticket, source)
        assert len(copies) == files
    wire.close()


def test_without_memory_the_offer_stands_and_sending_says_so(tmp_path, monkeypatch):
    """The other ranks are about to gather: the one that leads takes its part before it fails."""

    def full(*arguments):
        raise WeightSyncError("no space for weights")

    monkeypatch.setattr(pull, "WeightFile", full)
    wire, taken = Wire("pull", tmp_path), []
    source = ToySource(toy_weights(), 1, halt=taken.append)
    ticket = wire.source.offer(source)
    with pytest.raises(WeightSyncError, match="no space"):
        wire.source.send(ticket, source)
    assert taken == list(range(len(source.weights)))
    wire.close()


def large_weights(seed):
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    sizes = {"large": 60_000_001, "small": 7, "half": 33_000_000, "last": 20_000_000}
    return {
        name: torch.randn(size, generator=generator, device=CUDA).to(
            torch.bfloat16 if name == "half" else torch.float32
        )
        for name, size in sizes.items()
    }


@needs_cuda
def test_versions_of_a_device_arrive_bit_for_bit(tmp_path):
    """More bytes than are under way at a time; the device changes them when they have been sent."""
    settings = SyncSettings(name="ACTOR[0]", device="cuda", timeout_s=60.0)
    wire = Wire("pull", tmp_path, settings=settings)
    for version in range(4):
        weights = large_weights(version)
        source = ToySource(weights, version)
        stamp, (received,) = wire.sync(source)
        host = {name: tensor.cpu() for name, tensor in large_weights(version).items()}
        for tensor in weights.values():
            tensor.zero_()
        assert equal(received, host) and received.stamp == stamp
        assert received.lock_pages(CUDA) and received.tensor("half").is_pinned()
    wire.close()


@needs_cuda
def test_a_device_whose_source_fails_can_send_again(tmp_path):
    def halt(number):
        if number == 3:
            raise RuntimeError("the source has failed")

    wire = Wire("pull", tmp_path, settings=SyncSettings(device="cuda", timeout_s=60.0))
    source = ToySource(large_weights(1), 1, halt=halt)
    with pytest.raises(RuntimeError, match="has failed"):
        wire.source.send(wire.source.offer(source), source)
    stamp, (received,) = wire.sync(ToySource(source.weights, 1))
    assert equal(received, {name: tensor.cpu() for name, tensor in source.weights.items()})
    wire.close()
