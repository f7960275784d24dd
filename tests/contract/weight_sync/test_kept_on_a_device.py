# SPDX-License-Identifier: Apache-2.0
"""Versions that stay in their sender's device memory: how many, who reads them, and what is said when they cannot be
read. A host stands in for the device, but in the last test."""

import os
import time
from dataclasses import replace

import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, WeightsLost, WeightSyncError
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.weight_sync import cuda_ipc, weight_server
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.buckets import BLOCK_BYTES
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from tests.support.sync_sides import (
    PATIENT,
    ToySource,
    Wire,
    equal,
    hear,
    kill,
    process,
    receive_side,
    send_side,
    toy_weights,
    transport,
)


def test_weights_on_another_device_are_refused_with_both_names(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_identify", "device {}".format)
    wire = Wire("cuda_ipc", tmp_path)
    wire.sinks = [transport("cuda_ipc", tmp_path, replace(PATIENT, name="ROLLOUT[0]", device="cpu:1"))]
    with pytest.raises(EngineError, match=r"is on the device device cpu, and ROLLOUT\[0\] on device cpu:1"):
        wire.sync(ToySource(toy_weights(), version=1))
    wire.close()


def test_a_version_on_a_device_is_lost_with_the_second_after_it(tmp_path):
    wire = Wire("cuda_ipc", tmp_path)
    source = ToySource(toy_weights(1), version=1)
    ticket = wire.source.offer(source)
    wire.source.send(ticket, source)
    wire.sync(ToySource(toy_weights(2), version=2))
    assert equal(wire.sinks[0].receive(ticket), source.weights)
    wire.sync(ToySource(toy_weights(3), version=3))
    with pytest.raises(WeightsLost, match=r"version 1 from ACTOR\[0\] is not there"):
        wire.sinks[0].receive(ticket)
    wire.close()


def test_a_changed_byte_on_a_device_is_an_error_that_names_its_tensor(tmp_path):
    wire = Wire("cuda_ipc", tmp_path)
    source = ToySource({"first": torch.zeros(10_000), "second": torch.zeros(10_000)}, version=1)
    ticket = wire.source.offer(source)
    wire.source.send(ticket, source)
    (buffer,) = wire.source._versions._files.values()
    buffer.flat[ticket.table.spans()[1][1] - 1] ^= 4
    with pytest.raises(WeightSyncError, match=r"version 1 from ACTOR\[0\] refused: 'second' came with other bytes"):
        wire.sinks[0].receive(ticket)
    assert not buffer.readers
    wire.close()


def test_a_device_keeps_two_versions_unless_an_earlier_one_is_being_read(tmp_path):
    memory = DeviceMemory()
    wire = Wire("cuda_ipc", tmp_path, settings=replace(PATIENT, memory=memory))
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


def test_memory_of_another_process_is_opened_once_and_none_of_one_that_has_ended(tmp_path, monkeypatch):
    opened, buffers, sink = [], set(), transport("cuda_ipc", tmp_path, replace(PATIENT, name="ROLLOUT[0]"))
    monkeypatch.setattr(cuda_ipc, "map_tensor", lambda descriptor: opened.append(descriptor) or map_tensor(descriptor))
    for _ in range(2):
        with process(send_side, "cuda_ipc", tmp_path, 4, None, 5) as (_, pipe):
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


map_tensor = cuda_ipc.map_tensor


def refuse(*arguments):
    raise RuntimeError("CUDA error: invalid context\nand more")


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_memory_that_cannot_be_opened_is_an_error_that_names_the_way_around(tmp_path, monkeypatch, side):
    wire = Wire("cuda_ipc", tmp_path)
    source = ToySource(toy_weights(1), version=1)
    ticket = wire.source.offer(source)
    wire.source.send(ticket, source)
    monkeypatch.setattr(cuda_ipc, "_versions", {})  # as in another process
    monkeypatch.setattr(cuda_ipc.DeviceBuffer, "handle", refuse if side == "sender" else lambda buffer: (refuse, ()))
    with pytest.raises(EngineError, match="CUDA IPC, use engine.weight_sync 'pull': CUDA error: invalid context$"):
        wire.sinks[0].receive(ticket)
    monkeypatch.setattr(weight_server, "peer_credentials", lambda connection: (1, os.getuid() + 1))
    with pytest.raises(WeightsLost, match="another user's process listens at its name"):
        wire.sinks[0].receive(ticket)
    wire.close()


def test_a_receiver_of_another_process_that_is_killed_holds_no_version(tmp_path):
    wire = Wire("cuda_ipc", tmp_path)
    source = ToySource(toy_weights(1), version=1)
    ticket = wire.source.offer(source)
    wire.source.send(ticket, source)
    with process(receive_side, "cuda_ipc", tmp_path, "cpu", True) as (child, pipe):
        assert hear(pipe) == "up"
        pipe.send(ticket)
        assert hear(pipe) == source.stamp("cuda_ipc")
        (buffer,) = wire.source._versions._files.values()
        assert buffer.readers == 1
        kill(child)
    deadline_s = time.monotonic() + 5.0
    while buffer.readers:
        assert time.monotonic() < deadline_s
    wire.close()


@pytest.mark.feature(101)
@pytest.mark.needs("cuda")
def test_cuda_ipc_gives_the_same_weights(tmp_path):
    settings = SyncSettings(name="ACTOR[0]", device="cuda")
    sender, beside = CudaIpcTransport(settings), CudaIpcTransport(replace(settings, name="ROLLOUT[1]"))
    with process(receive_side, "cuda_ipc", tmp_path, "cuda") as (_, pipe):
        assert hear(pipe) == "up"
        for version in range(3):
            weights = {name: tensor.cuda() for name, tensor in toy_weights(version).items()}
            source = ToySource(weights, version)
            ticket = sender.offer(source)
            stamp = sender.send(ticket, source)
            pipe.send(ticket)
            assert hear(pipe) == stamp == source.stamp("cuda_ipc")
            received = beside.receive(ticket)
            assert received.stamp == stamp and equal(received, weights)
            assert all(buffer.is_cuda for buffer in received.buffers.values())
            del received
        pipe.send(None)
    sender.close()
