# SPDX-License-Identifier: Apache-2.0
"""Engines that share a device need no more memory than the larger one and a sync's buffers.

The device is simulated: host memory with an account and a capacity."""

from dataclasses import replace

import pytest

from dlrover.python.rl.engine.api.base import OptimizerConfig, RolloutSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_lock import DeviceLock
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.weight_sync.buckets import BLOCK_BYTES
from tests.support.sync_sides import PATIENT, completions, step, turn_of

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


@pytest.mark.parametrize("kind", ["pull", "disk", "broadcast", "cuda_ipc"])
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
