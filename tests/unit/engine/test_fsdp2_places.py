# SPDX-License-Identifier: Apache-2.0
"""Offload of the fsdp2 engine in one process: what is where, what it costs, and that it changes nothing."""

import gc
import weakref

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

CONFIG = OptimizerConfig(lr=1e-3)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)


def batch(seed=0):
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in (9, 4, 17, 6)]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    return Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})


def step(engine, seed=0):
    return engine.step(batch(seed), lambda logprobs, columns: (-logprobs.sum() / 20, {}))


def weights(engine):
    return {name: tensor.detach().clone() for name, tensor in engine.named_weights()}


def bits(engine):
    return {name: tensor.numpy().tobytes() for name, tensor in weights(engine).items()}


@pytest.mark.feature(17, 55)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trip_to_the_host_changes_nothing(model_path, precision):
    settings = TrainSettings(precision=precision)
    stayed, travelled = (Fsdp2TrainEngine(model_path, CONFIG, settings) for _ in range(2))
    for seed in range(3):
        travelled.cpu()
        assert (travelled.place(), travelled.footprint()) == ("cpu", {})
        travelled.cuda()
        assert step(stayed, seed) == step(travelled, seed)
        assert travelled.footprint() == stayed.footprint()
    assert bits(stayed) == bits(travelled)


def test_optimizer_and_weights_are_accounted_for(model_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    count = sum(tensor.numel() for tensor in weights(engine).values())
    held = engine.footprint()
    assert held["weights"] - 4 * count in range(0, 1000)  # and the rotary frequencies
    assert held["optimizer"] - 8 * count in range(0, 1000)
    assert Fsdp2TrainEngine(model_path, None).footprint().keys() == {"weights"}


def test_gradients_count_in_the_peak_and_are_gone_after_the_step(model_path):
    memory = DeviceMemory()
    engine = Fsdp2TrainEngine(model_path, CONFIG, memory=memory)
    before = memory.total()
    step(engine)
    count = sum(tensor.numel() for tensor in weights(engine).values())
    assert memory.peak >= before + 4 * count
    assert memory.total() == before


def test_what_does_not_fit_stays_in_host_memory_and_the_holders_are_named(model_path):
    memory = DeviceMemory()
    actor, reference = (
        Fsdp2TrainEngine(model_path, CONFIG, memory=memory),
        Fsdp2TrainEngine(model_path, None, memory=memory),
    )
    actor.cpu()
    memory.capacity = memory.total() + 1000
    with pytest.raises(OutOfDeviceMemory, match=r"trained .*T asks for .* \(frozen .*T: [\d,]+ of weights"):
        actor.cuda()
    assert (actor.place(), actor.footprint()) == ("cpu", {})
    reference.cpu()
    memory.capacity = 10**9
    actor.cuda()
    assert step(actor).loss


def test_a_call_on_an_offloaded_engine_names_the_way_back(model_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    kept = bits(engine)
    engine.cpu()
    for call in (lambda: step(engine), lambda: engine.evaluate(batch()), lambda: engine.save_checkpoint("x")):
        with pytest.raises(EngineError, match=r"in host memory: call cuda\(\) first"):
            call()
    with pytest.raises(EngineError, match="no key-value cache"):
        engine.cuda("kv_cache")
    # Weights can be had from there all the same.
    assert bits(engine) == kept
    assert engine.publish().stamp.version == 0
    state = engine.state_dict()
    engine.load_state_dict(state)
    engine.cuda()
    assert bits(engine) == kept


@pytest.mark.feature(20)
def test_after_meta_no_weight_is_alive_and_new_weights_bring_it_back(model_path):
    actor, reference = Fsdp2TrainEngine(model_path, CONFIG), Fsdp2TrainEngine(model_path, None)
    step(actor)
    expected = actor.evaluate(batch()).ragged("logprobs").values
    for engine in (actor, reference):
        alive = [weakref.ref(tensor) for _, tensor in engine.named_weights()]
        alive += [weakref.ref(part) for part in engine._model.optimizer.tensors()] if engine is actor else []
        sent, state = actor.publish() if engine is reference else None, engine.state_dict() if engine is actor else None
        state = state and {**state, "model": copies(state["model"]), "optimizer": copies(state["optimizer"])}
        engine.meta()
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]
        assert (engine.place(), engine.footprint()) == ("meta", {})
        with pytest.raises(EngineError, match=r"which meta\(\) released"):
            engine.evaluate(batch())
        engine.cuda()
        with pytest.raises(EngineError, match="brings new ones"):
            engine.evaluate(batch())
        engine.receive(sent) if sent else engine.load_state_dict(state)
        assert engine.place() == "cuda"
        assert np.array_equal(engine.evaluate(batch()).ragged("logprobs").values, expected)


@pytest.mark.parametrize("call", ["evaluate", "step", "cuda"])
def test_a_device_that_is_full_while_it_computes_is_told_by_who_holds_it(model_path, monkeypatch, call):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    before = bits(engine)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    if call == "cuda":
        engine.cpu()
        monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    else:
        monkeypatch.setattr(torch.nn.functional, "embedding", full)
    with pytest.raises(
        OutOfDeviceMemory, match=r"trained .*T ran out of memory while computing on cpu: .* bytes are in use"
    ):
        {"evaluate": lambda: engine.evaluate(batch()), "step": lambda: step(engine), "cuda": engine.cuda}[call]()
    monkeypatch.undo()
    assert engine.place() == ("cpu" if call == "cuda" else "cuda")
    assert bits(engine) == before


def copies(tree):
    return {name: copies(value) if isinstance(value, dict) else value.clone() for name, value in tree.items()}


def test_two_engines_of_a_model_are_told_apart(model_path):
    memory = DeviceMemory()
    engines = [Fsdp2TrainEngine(model_path, None, memory=memory) for _ in range(2)]
    assert len(memory.by_owner()) == 2
    assert engines[0].footprint() == engines[1].footprint()
