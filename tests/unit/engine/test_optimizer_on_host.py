# SPDX-License-Identifier: Apache-2.0
"""``optimizer_on_host``: the same bits, with the float32 weights and the moments off the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlrover.python.rl.common.errors import NonFiniteUpdate
from dlrover.python.rl.data import device_bytes
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.fsdp2.shards import Shards
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

CONFIG = OptimizerConfig(lr=1e-3, warmup_steps=6, weight_decay=0.1, max_grad_norm=0.5)
STEPS = range(3)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)


def make(path, on_host, precision="bf16", config=CONFIG, **changes):
    backend = {"optimizer_on_host": on_host}
    # Several micro-batches, whose gradients add up.
    settings = TrainSettings(precision=precision, max_tokens_per_microbatch=16, backend=backend, **changes)
    return Fsdp2TrainEngine(path, config, settings)


def batch_of(seed):
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in (9, 4, 17, 6)]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    return Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})


def step(engine, seed):
    return engine.step(batch_of(seed), lambda logprobs, columns: (-logprobs.sum() / 20, {}))


def bits(engine, dtype=None):
    return {name: (str(tensor.dtype), tensor.float().numpy().tobytes()) for name, tensor in engine.named_weights(dtype)}


def buffers(engine):
    return sum(buffer.nbytes for buffer in engine._model.module.buffers())


@pytest.fixture(scope="module")
def trained(model_path):
    """One of each kind after some steps, and what the steps gave."""
    found = {}
    for precision in ("fp32", "bf16"):
        for on_host in (False, True):
            engine = make(model_path, on_host, precision)
            found[precision, on_host] = engine, [step(engine, seed) for seed in STEPS]
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_give_the_same_bits(trained, precision):
    (plain, wanted), (engine, results) = trained[precision, False], trained[precision, True]
    assert results == wanted
    for dtype in (None, torch.float32, torch.bfloat16):
        assert bits(engine, dtype) == bits(plain, dtype)


@pytest.mark.parametrize(("precision", "weights"), [("fp32", 4), ("bf16", 2)])
def test_a_device_has_the_weights_of_the_passes_alone(trained, precision, weights):
    engine, _ = trained[precision, True]
    assert engine.footprint() == {"weights": weights * engine.parameter_count + buffers(engine)}
    plain, _ = trained[precision, False]
    assert plain.footprint()["optimizer"] >= 8 * engine.parameter_count


def test_of_a_parameter_a_device_has_six_bytes_in_a_step(model_path):
    engine, seen = make(model_path, on_host=True), []
    reduced = engine._model.reduce_gradients

    def reduce_gradients():
        gradients = reduced()
        seen.append(sum(gradient.nbytes for gradient in gradients) + sum(engine.footprint().values()))
        return gradients

    engine._model.reduce_gradients = reduce_gradients
    step(engine, 0)
    assert seen == [6 * engine.parameter_count + buffers(engine)]


@pytest.mark.parametrize("before", [False, True])
def test_a_state_goes_on_in_either_place(model_path, trained, before):
    """``before``: on the host before, and on the device afterwards."""
    source, _ = trained["bf16", before]
    engine, twin = make(model_path, not before), make(model_path, before)
    for other in (engine, twin):
        other.load_state_dict(source.state_dict())
    assert step(engine, 7) == step(twin, 7)
    assert bits(engine) == bits(twin)


@pytest.mark.parametrize("before", [False, True])
def test_a_checkpoint_goes_on_in_either_place(tmp_path, model_path, trained, before):
    trained["bf16", before][0].save_checkpoint(tmp_path / "checkpoint")
    engine, twin = make(model_path, not before), make(model_path, before)
    for other in (engine, twin):
        other.load_checkpoint(tmp_path / "checkpoint")
    assert step(engine, 7) == step(twin, 7)
    assert bits(engine) == bits(twin)


def test_it_makes_room_for_others_and_comes_back(model_path):
    engine, undisturbed = make(model_path, on_host=True), make(model_path, on_host=True)
    step(engine, 0)
    engine.cpu()
    assert engine.footprint() == {}
    assert engine.state_dict()["optimizer"]
    published = bits(engine)
    engine.cuda()
    step(engine, 1)
    step(undisturbed, 0)
    assert published == bits(undisturbed)
    step(undisturbed, 1)
    assert bits(engine) == bits(undisturbed)


def test_a_refused_update_changes_nothing_and_leaves_no_gradient(model_path):
    engine, twin = make(model_path, on_host=True), make(model_path, on_host=True)
    step(engine, 0), step(twin, 0)
    before, passes = bits(engine), []

    def infinite_in_the_second_pass(logprobs, columns):
        passes.append(None)
        return -logprobs.sum() / (20 if len(passes) < 2 else 0.0), {}

    with pytest.raises(NonFiniteUpdate):
        engine.step(batch_of(1), infinite_in_the_second_pass)
    assert len(passes) > 1 and bits(engine) == before
    assert step(engine, 1) == step(twin, 1), "nothing was added to a gradient that is left"


def test_a_step_that_fails_leaves_no_gradient(model_path, monkeypatch):
    engine, twin = make(model_path, on_host=True), make(model_path, on_host=True)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine._model.optimizer._inner, "step", lambda: 1 / 0)
        step(engine, 0)
    assert all(shard.gradient is None and shard.master.grad is None for shard in engine._model.shards)
    step(engine, 1)
    step(twin, 1)
    assert bits(engine) == bits(twin)


def test_the_gradients_of_a_device_come_in_pieces(monkeypatch):
    monkeypatch.setattr(device_bytes, "PIECE", 1 << 8)
    monkeypatch.setattr(device_bytes, "_buffers", {})
    source, target = torch.randn(7, 100).t(), torch.zeros(100, 7)
    device_bytes.copy_to_host(source, target)
    assert torch.equal(source, target)


def test_adapters_meet_the_model_where_it_is(model_path, monkeypatch):
    """With FakeTensors in the place of a device's, which cannot be copied."""
    pytest.importorskip("peft")
    engine = make(model_path, on_host=True, lora=LoraSettings(rank=4))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)
    backend = engine._model
    with FakeTensorMode():
        items = []
        for shard in backend.shards:
            there = torch.empty(shard.parameter.shape, dtype=shard.parameter.dtype, device="cuda:0")
            here = torch.empty(shard.master.shape) if shard.on_host else there
            items.append(replace(shard, parameter=there.requires_grad_(shard.trained), master=here))
        backend.shards, backend.buffers = Shards(backend.shards.grid, tuple(items)), {}
        backend.parked.locate = torch.Tensor.detach
        devices = {tensor.device.type for _, tensor in backend.named_weights(torch.bfloat16)}
    assert devices == {"cuda"}


def test_of_a_model_with_adapters_those_are_on_the_host(model_path):
    pytest.importorskip("peft")
    engine, plain = (make(model_path, on_host, lora=LoraSettings(rank=4)) for on_host in (True, False))
    assert [step(engine, seed) for seed in STEPS] == [step(plain, seed) for seed in STEPS]
    assert bits(engine) == bits(plain)
    assert all(shard.on_host == shard.trained for shard in engine._model.shards)


def test_a_frozen_model_has_nothing_there(model_path):
    frozen = make(model_path, on_host=True, config=None)
    assert not any(shard.on_host for shard in frozen._model.shards)
