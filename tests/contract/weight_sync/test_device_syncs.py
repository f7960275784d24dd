# SPDX-License-Identifier: Apache-2.0
"""Weights on a device: copied to host memory piece by piece, or kept there for receivers that share the device.

A host stands in for the device, but in the tests that need CUDA: host memory with an account and a capacity.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, WeightsLost, WeightSyncError
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, RolloutSettings, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_lock import DeviceLock
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.loading import DTYPES
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.weight_sync import buckets, cuda_ipc, pull, weight_server
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.buckets import BLOCK_BYTES, WeightFile, stream_to_host
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.transports import make_transport
from tests.support import sync_sides
from tests.support.commands import wait_for
from tests.support.sync_sides import (
    PATIENT,
    ToySource,
    completions,
    equal,
    hear,
    kill,
    process,
    step,
    toy_weights,
    transport,
    turn_of,
)

CUDA = torch.device("cuda")
UNDER_WAY = 3000

needs_cuda = pytest.mark.needs("cuda")


class Pages:
    def lock(self, device):
        return True


class Piece:
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


def test_read_bytes_have_arrived_and_few_are_under_way(arrivals):
    target, pieces = np.zeros(10_000, dtype=np.uint8), [(1000 * number, Piece(number + 1)) for number in range(10)]
    read = 0
    for stop in stream_to_host(target, Pages(), iter(pieces)):
        assert target[read:stop].all()
        assert len(arrivals) * 1000 - stop <= UNDER_WAY
        read = stop
    assert read == 10_000 and target.tolist() == np.repeat(np.arange(1, 11), 1000).tolist()


def test_pieces_of_the_host_keep_the_order(arrivals):
    pieces = [(0, Piece(1)), (1000, Piece(2)), (2000, torch.full((500,), 3, dtype=torch.uint8)), (2500, Piece(4))]
    target = np.zeros(3500, dtype=np.uint8)
    for stop in stream_to_host(target, Pages(), iter(pieces)):
        assert target[:stop].all()
    assert target.tolist() == [1] * 1000 + [2] * 1000 + [3] * 500 + [4] * 1000


def test_failing_source_leaves_no_copy_under_way(arrivals):
    def pieces():
        yield 0, Piece(1)
        yield 1000, Piece(2)
        raise RuntimeError("the source has failed")

    with pytest.raises(RuntimeError, match="has failed"):
        list(stream_to_host(np.zeros(2000, dtype=np.uint8), Pages(), pieces()))
    assert [arrival.has_ended for arrival in arrivals] == [True, True]


def test_memory_is_there_before_a_receiver_waits(connect, monkeypatch):
    copies = []

    class Counted(WeightFile):
        def __init__(self, *arguments):
            copies.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(pull, "WeightFile", Counted)
    wire = connect("pull")
    for version, files in ((1, 1), (2, 2), (3, 2), (4, 2)):
        source = ToySource(toy_weights(version), version)
        ticket = wire.source.offer(source)
        assert len(copies) == files
        wire.attempt(ticket, source)
        assert len(copies) == files


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
def test_versions_of_a_device_arrive_bit_for_bit(connect):
    """More bytes than are under way at a time; the device changes them when they have been sent."""
    settings = SyncSettings(name="ACTOR[0]", device="cuda", timeout_s=60.0)
    wire = connect("pull", settings=settings)
    for version in range(4):
        weights = large_weights(version)
        source = ToySource(weights, version)
        stamp, (received,) = wire.sync(source)
        host = {name: tensor.cpu() for name, tensor in large_weights(version).items()}
        for tensor in weights.values():
            tensor.zero_()
        assert equal(received, host) and received.stamp == stamp
        assert received.lock_pages(CUDA) and received.tensor("half").is_pinned()


@needs_cuda
def test_device_with_a_failed_source_can_send_again(connect):
    def halt(number):
        if number == 3:
            raise RuntimeError("the source has failed")

    wire = connect("pull", settings=SyncSettings(device="cuda", timeout_s=60.0))
    source = ToySource(large_weights(1), 1, halt=halt)
    with pytest.raises(RuntimeError, match="has failed"):
        wire.source.send(wire.source.offer(source), source)
    stamp, (received,) = wire.sync(ToySource(source.weights, 1))
    assert equal(received, {name: tensor.cpu() for name, tensor in source.weights.items()})


def test_weights_on_another_device_are_refused_by_name(connect, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_identify", "device {}".format)
    wire = connect("cuda_ipc")
    wire.sinks = [transport("cuda_ipc", replace(PATIENT, name="ROLLOUT[0]", device="cpu:1"))]
    with pytest.raises(EngineError, match=r"is on the device device cpu, and ROLLOUT\[0\] on device cpu:1"):
        wire.sync(ToySource(toy_weights(), version=1))


def test_changed_byte_on_a_device_names_its_tensor(connect):
    wire = connect("cuda_ipc")
    source = ToySource({"first": torch.zeros(10_000), "second": torch.zeros(10_000)}, version=1)
    ticket, _ = sync_sides.publish(wire.source, source)
    (buffer,) = wire.source._versions._files.values()
    buffer.flat[ticket.table.spans()[1][1] - 1] ^= 4
    with pytest.raises(WeightSyncError, match=r"version 1 from ACTOR\[0\] refused: 'second' came with other bytes"):
        wire.sinks[0].receive(ticket)
    assert not buffer.readers


def test_device_keeps_two_versions_and_any_being_read(connect):
    memory = DeviceMemory()
    wire = connect("cuda_ipc", settings=replace(PATIENT, memory=memory))
    _, (received,) = wire.sync(ToySource(toy_weights(1), version=1))
    one = memory.total()
    assert 0 <= one - received.nbytes < 2 * BLOCK_BYTES
    wire.sync(ToySource(toy_weights(2), version=2))
    assert memory.total() == 2 * one
    wire.sync(ToySource(toy_weights(3), version=3))
    assert memory.total() == 3 * one and equal(received, toy_weights(1))
    del received
    for version in range(4, 8):
        _, (received,) = wire.sync(ToySource(toy_weights(version), version))
        assert memory.total() == 2 * one and equal(received, toy_weights(version))
        del received
    other = ToySource({"norm": torch.ones(3)}, version=9)
    for count in (1, 2):
        wire.sync(other)
        assert len({buffer.table for buffer in wire.source._versions._files.values()}) == 3 - count
    wire.close()
    assert not memory.total()


def test_memory_of_another_process_is_opened_once(monkeypatch):
    opened, buffers, map_tensor = [], set(), cuda_ipc.map_tensor
    sink = transport("cuda_ipc", replace(PATIENT, name="ROLLOUT[0]"))
    monkeypatch.setattr(cuda_ipc, "map_tensor", lambda descriptor: opened.append(descriptor) or map_tensor(descriptor))
    for _ in range(2):
        with process(sync_sides.send_side, "cuda_ipc", 4, None, 5) as (_, pipe):
            ticket = hear(pipe)
            for version in range(5):
                pipe.send(ticket)
                weights = sink.receive(ticket)
                assert weights.stamp == hear(pipe)
                last = list(sink._opened.values())[-1]
                assert 0 <= max(map(torch.Tensor.data_ptr, weights.buffers.values())) - last.data_ptr() < len(last)
                buffers.update(sink._opened)
                del weights
                ticket = hear(pipe) if version < 4 else None
            assert len(sink._opened) == 2
    assert len(opened) == len(buffers), "two by each sender, more where one was still read"
    sink.close()


def refuse(*arguments):
    raise RuntimeError("CUDA error: invalid context\nand more")


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_unopenable_memory_names_the_way_around(connect, monkeypatch, side):
    wire = connect("cuda_ipc")
    ticket, _ = sync_sides.publish(wire.source, ToySource(toy_weights(1), version=1))
    monkeypatch.setattr(cuda_ipc, "_versions", {})  # as in another process
    monkeypatch.setattr(cuda_ipc.DeviceBuffer, "handle", refuse if side == "sender" else lambda buffer: (refuse, ()))
    with pytest.raises(EngineError, match="CUDA IPC, use engine.weight_sync 'pull': CUDA error: invalid context$"):
        wire.sinks[0].receive(ticket)
    monkeypatch.setattr(weight_server, "peer_credentials", lambda connection: (1, os.getuid() + 1))
    with pytest.raises(WeightsLost, match="another user's process listens at its name"):
        wire.sinks[0].receive(ticket)


def test_killed_receiver_reads_no_version_of_a_device(connect):
    wire = connect("cuda_ipc")
    source = ToySource(toy_weights(1), version=1)
    ticket, _ = sync_sides.publish(wire.source, source)
    with process(sync_sides.receive_side, "cuda_ipc", "cpu", True) as (child, pipe):
        assert hear(pipe) == "up"
        pipe.send(ticket)
        assert hear(pipe) == source.stamp("cuda_ipc")
        (buffer,) = wire.source._versions._files.values()
        assert buffer.readers == 1
        kill(child)
    wait_for(lambda: not buffer.readers, 5.0)


@pytest.mark.feature(101)
@pytest.mark.needs("cuda")
def test_cuda_ipc_gives_the_same_weights():
    settings = SyncSettings(name="ACTOR[0]", device="cuda")
    sender, beside = CudaIpcTransport(settings), CudaIpcTransport(replace(settings, name="ROLLOUT[1]"))
    with process(sync_sides.receive_side, "cuda_ipc", "cuda") as (_, pipe):
        assert hear(pipe) == "up"
        for version in range(3):
            weights = {name: tensor.cuda() for name, tensor in toy_weights(version).items()}
            source = ToySource(weights, version)
            ticket, stamp = sync_sides.publish(sender, source)
            pipe.send(ticket)
            assert hear(pipe) == stamp == source.stamp("cuda_ipc")
            received = beside.receive(ticket)
            assert received.stamp == stamp and equal(received, weights)
            assert all(buffer.is_cuda for buffer in received.buffers.values())
            del received
        pipe.send(None)
    sender.close()


@pytest.mark.needs("cuda")
@pytest.mark.parametrize("kind", ["pull", "cuda_ipc"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adapters", ["none", "plain", "nf4"])
def test_rollout_on_cuda_serves_the_sent_weights(tmp_path, kind, precision, adapters):
    lora = None
    if adapters != "none":
        pytest.importorskip("peft", reason="the extra 'lora' is not installed")
        lora = LoraSettings(rank=2, quantize_base="nf4" if adapters == "nf4" else None)
    if adapters == "nf4":
        pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    model = write_tiny_model(tmp_path / "T", hidden=512, layers=2)
    actor = Fsdp2TrainEngine(model, OptimizerConfig(lr=1e-2), TrainSettings("cuda", precision, lora=lora))
    rollout = TorchRolloutEngine(model, RolloutSettings("cuda", precision))
    settings = SyncSettings(device="cuda", dtype=DTYPES[precision], channel="ACTOR")
    sender, receiver = (make_transport(kind, {}, settings) for _ in range(2))
    for seed in range(3):
        step(actor, seed)
        ticket, stamp = sync_sides.publish(sender, actor)
        received = receiver.receive(ticket)
        assert (received.stamp, received.adapters is None) == (stamp, lora is None)
        assert lora is None or kind != "pull" or received.lock_pages(CUDA)
        rollout.receive(received)
        for name, tensor in actor.named_weights(DTYPES[precision]):
            assert torch.equal(rollout._decoder.store.views[name], tensor), name
        del received
    for each in (sender, receiver, actor, rollout):
        each.close()


# -- engines that share a device: the larger one's memory and a sync's buffers suffice ---------------------------------

BUCKET = 8192


def trainer(model_path, memory):
    return Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2), memory=memory)


def rollout(model_path, memory):
    return TorchRolloutEngine(model_path, RolloutSettings(max_batch=16), memory)


def apart(model_path, wire):
    """The peak memory of each engine by itself, and what is generated after each of three steps."""
    memories, generated = (DeviceMemory(), DeviceMemory()), []
    trained, served = trainer(model_path, memories[0]), rollout(model_path, memories[1])
    for seed in range(3):
        served.receive(wire.sync(trained)[1][0])
        generated.append(completions(served))
        step(trained, seed)
    return memories[0].peak, memories[1].peak, generated


def together(model_path, wire, locks, memory):
    """Return what is generated after each of three steps, of engines that have the device in turn."""
    (actor_lock, rollout_lock), generated = locks, []
    with turn_of(actor_lock):
        trained = trainer(model_path, memory)
        trained.cpu()
    with turn_of(rollout_lock):
        served = rollout(model_path, memory)
        served.meta()
    for seed in range(3):
        with turn_of(actor_lock):
            _, (snapshot,) = wire.sync(trained)
        with turn_of(rollout_lock):
            served.cuda("weights")
            served.receive(snapshot)
            served.cuda("kv_cache")
            generated.append(completions(served))
            served.meta()
        with turn_of(actor_lock):
            trained.cuda()
            step(trained, seed)
            trained.cpu()
    return generated


@pytest.mark.parametrize("kind", ["pull", "broadcast", "cuda_ipc"])
def test_collocated_step_needs_the_larger_role_and_sync_buffers(kind, connect, tmp_path, model_path):
    plain = connect("pull")
    trained, served, generated = apart(model_path, plain)
    weights = plain.source.offer(trainer(model_path, DeviceMemory())).table.nbytes
    limit = max(trained, served) + (2 * (weights + BLOCK_BYTES) if kind == "cuda_ipc" else BUCKET)
    assert trained + served > limit
    memory = DeviceMemory(capacity=limit)
    wire = connect(kind, settings=replace(PATIENT, bucket_bytes=BUCKET, memory=memory))
    locks = [DeviceLock(tmp_path / "lock", role, memory) for role in ("ACTOR[0]", "ROLLOUT[0]")]
    assert together(model_path, wire, locks, memory) == generated
    assert max(trained, served) <= memory.peak <= limit
    for lock in locks:
        lock.close()
