# SPDX-License-Identifier: Apache-2.0
"""Weights between engines that share a CUDA device."""

import pytest
import torch

from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, RolloutSettings, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.loading import DTYPES
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.transports import make_transport
from tests.support.sync_sides import step

pytestmark = [
    pytest.mark.needs("cuda"),
    pytest.mark.parametrize("kind", ["pull", "cuda_ipc"]),
    pytest.mark.parametrize("precision", ["fp32", "bf16"]),
]


def both_sides(kind, precision):
    settings = SyncSettings(device="cuda", dtype=DTYPES[precision], channel="ACTOR")
    return [make_transport(kind, {}, settings) for _ in range(2)]


def test_a_rollout_engine_on_cuda_serves_what_was_sent(tmp_path, kind, precision):
    model = write_tiny_model(tmp_path / "T", hidden=64, layers=2)
    train = Fsdp2TrainEngine(model, OptimizerConfig(lr=1e-3), TrainSettings("cuda", precision))
    rollout = TorchRolloutEngine(model, RolloutSettings("cuda", precision))
    sender, receiver = both_sides(kind, precision)
    for version in range(3):
        shard = next(iter(train._model.shards))
        for weight in {id(each): each for each in (shard.master, shard.parameter)}.values():
            weight.data += 1.0
        train.version = version
        ticket = sender.offer(train)
        stamp = sender.send(ticket, train)
        received = receiver.receive(ticket)
        rollout.receive(received)
        assert received.stamp == stamp
        for name, tensor in train.named_weights(DTYPES[precision]):
            assert torch.equal(rollout._decoder.store.views[name], tensor), name
        del received
    for engine in (sender, receiver, train, rollout):
        engine.close()


@pytest.mark.parametrize("base", [None, "nf4"])
def test_a_rollout_engine_on_cuda_adds_adapters_there(tmp_path, kind, precision, base):
    """Return the bits that the actor computes with, on a device of the same kind."""
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    if base is not None:
        pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    model, lora = write_tiny_model(tmp_path / "T", hidden=512, layers=2), LoraSettings(rank=2, quantize_base=base)
    actor = Fsdp2TrainEngine(model, OptimizerConfig(lr=1e-2), TrainSettings("cuda", precision, lora=lora))
    rollout = TorchRolloutEngine(model, RolloutSettings("cuda", precision))
    sender, receiver = both_sides(kind, precision)
    for seed in range(3):
        step(actor, seed)
        ticket = sender.offer(actor)
        sender.send(ticket, actor)
        received = receiver.receive(ticket)
        assert received.adapters is not None
        assert kind != "pull" or received.lock_pages(torch.device("cuda"))
        rollout.receive(received)
        for name, tensor in actor.named_weights(DTYPES[precision]):
            assert torch.equal(rollout._decoder.store.views[name], tensor), name
    for each in (sender, receiver, actor, rollout):
        each.close()
