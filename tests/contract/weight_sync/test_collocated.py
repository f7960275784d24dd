# SPDX-License-Identifier: Apache-2.0
"""Roles that share a device need no more memory than the larger one and a sync's buffers.

The device is simulated: host memory with an account and a capacity."""

from dataclasses import replace

import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory
from dlrover.python.rl.engine.api.weights import verify_snapshot
from dlrover.python.rl.engine.memory.device_lock import DeviceLock
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.weight_sync.buckets import BLOCK_BYTES
from tests.support.sync_sides import PATIENT, Wire

BUCKET = 8192
SHAPES = {"embed": (300, 64), "up": (64, 200), "down": (200, 64), "norm": (64,)}
WEIGHTS = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())


class Toy:
    """Tensors on the device, on the host, or nowhere."""

    owner = ""

    def __init__(self, memory):
        self.memory, self.version = memory, 0
        self.tensors, self.at = {}, "cpu"

    def put(self, kind, name, tensor):
        self.tensors[kind, name] = self.memory.bring(self.owner, kind, tensor)

    def cpu(self):
        self.tensors = {key: tensor.clone() for key, tensor in self.tensors.items() if key[0] != "kv_cache"}
        self.at = "cpu"

    def cuda(self, part="all"):
        if self.at == "cpu" and part in ("all", "weights"):
            for (kind, name), tensor in list(self.tensors.items()):
                if part == "all" or kind == part:
                    self.put(kind, name, tensor)
            self.at = "cuda"

    def meta(self):
        self.tensors, self.at = {}, "meta"

    def named_weights(self):
        for name in SHAPES:
            yield name, self.tensors["weights", name]


class ToyTrain(Toy):
    """Weights and two moments, and gradients during a step: four times the weights at its peak."""

    owner = "actor"

    def __init__(self, memory):
        super().__init__(memory)
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.put("weights", name, torch.randn(shape, generator=generator))
            self.put("optimizer", f"{name}.first", torch.zeros(shape))
            self.put("optimizer", f"{name}.second", torch.zeros(shape))
        self.at = "cuda"

    def step(self, signal):
        if self.at != "cuda":
            raise EngineError("the weights are on the host")
        gradients = {
            name: self.memory.bring(self.owner, "gradients", torch.sin(tensor * signal))
            for name, tensor in self.named_weights()
        }
        for name, gradient in gradients.items():
            first, second = (self.tensors["optimizer", f"{name}.{which}"] for which in ("first", "second"))
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient**2, 0.01)
            self.tensors["weights", name].sub_(0.01 * first / (second.sqrt() + 1e-8))
        self.version += 1


class ToyRollout(Toy):
    """Weights, and a key-value cache that is larger than they are."""

    owner = "rollout"

    def __init__(self, memory):
        super().__init__(memory)
        self.version = -1
        self.meta()

    def cuda(self, part="all"):
        if self.at == "meta" and part in ("all", "weights"):
            for name, shape in SHAPES.items():
                self.put("weights", name, torch.zeros(shape))
            self.at = "cuda"
        super().cuda(part)
        if part in ("all", "kv_cache"):
            self.put("kv_cache", "", torch.zeros(2 * WEIGHTS, dtype=torch.uint8))

    def receive(self, snapshot):
        verify_snapshot(snapshot, SHAPES, self.version)
        for name, tensor in self.named_weights():
            tensor.copy_(snapshot.tensor(name))
        self.version = snapshot.version

    def generate(self):
        if self.at != "cuda" or ("kv_cache", "") not in self.tensors:
            raise EngineError("not on the device")
        return float(sum(tensor.double().sum() for _, tensor in self.named_weights()))


def alone():
    """The peak memory of each role by itself."""
    train, rollout = (DeviceMemory() for _ in range(2))
    ToyTrain(train).step(1.0)
    ToyRollout(rollout).cuda()
    return train.peak, rollout.peak


class Collocated:
    """Both roles on one device."""

    def __init__(self, kind, folder, memory):
        self.memory = memory
        settings = replace(PATIENT, bucket_bytes=BUCKET, memory=memory)
        self.kind, self.wire = kind, Wire(kind, folder / "wire", settings=settings)
        self.actor, self.rollout = (DeviceLock(folder / "lease", role, memory) for role in ("ACTOR[0]", "ROLLOUT[0]"))
        with self.actor.acquired():
            self.train = ToyTrain(memory)
            self.train.cpu()
        self.serving = ToyRollout(memory)

    def step(self):
        """A round: sync, sample, learn."""
        self.sync()
        with self.rollout.acquired():
            self.serving.cuda("kv_cache")
            signal = self.serving.generate()
            self.serving.meta()
        with self.actor.acquired():
            self.train.cuda()
            self.train.step(signal)
            self.train.cpu()
        return signal

    def sync(self):
        """Sync weights from one engine to the other."""
        with self.actor.acquired():
            _, (snapshot,) = self.wire.sync(self.train)
        with self.rollout.acquired():
            self.serving.cuda("weights")
            self.serving.receive(snapshot)

    def close(self):
        self.wire.close()
        self.actor.close()
        self.rollout.close()


def signals_without_offload(steps):
    """Return the losses of the steps with both engines on a device that is large enough."""
    memory, losses = DeviceMemory(), []
    train, rollout = ToyTrain(memory), ToyRollout(memory)
    rollout.cuda()
    wire = Wire("pull", None)
    for _ in range(steps):
        rollout.receive(wire.sync(train)[1][0])
        losses.append(rollout.generate())
        train.step(losses[-1])
    return losses


@pytest.mark.parametrize(
    ("kind", "sync_bytes"),
    [("pull", BUCKET), ("disk", BUCKET), ("broadcast", BUCKET), ("cuda_ipc", 2 * (WEIGHTS + BLOCK_BYTES))],
)
def test_collocated_step_needs_the_larger_role_and_sync_buffers(kind, sync_bytes, tmp_path):
    trained, served = alone()
    limit = max(trained, served) + sync_bytes
    assert trained + served > limit
    roles = Collocated(kind, tmp_path, DeviceMemory(capacity=limit))
    signals = [roles.step() for _ in range(3)]
    assert max(trained, served) <= roles.memory.peak <= limit
    assert signals == signals_without_offload(3)
    roles.close()


def test_role_that_keeps_its_memory_is_named(tmp_path):
    trained, served = alone()
    roles = Collocated("pull", tmp_path, DeviceMemory(capacity=max(trained, served) + BUCKET))
    roles.step()
    roles.train.cuda()
    report = rf"actor: {WEIGHTS:,} of weights \+ {2 * WEIGHTS:,} of optimizer, rollout: {WEIGHTS:,} of weights"
    with pytest.raises(OutOfDeviceMemory, match=rf"rollout asks for {2 * WEIGHTS:,} bytes of kv_cache .*{report}"):
        roles.serving.cuda()
    roles.close()
