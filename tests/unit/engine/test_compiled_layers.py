# SPDX-License-Identifier: Apache-2.0
"""``compile_layers``: the same results up to rounding, of one compilation for all layers and batches."""

import functools

import numpy as np
import pytest
import torch
from processes import run
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.fsdp2.compiled_layers import compile_layers
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that Dynamo looks at

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)
LAYERS = 3
GRAPHS = 4  # of a layer, before attention and after it: two that begin with it, and two that end
STEPS = range(4)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=LAYERS, max_positions=64)


@pytest.fixture
def without_kernels(monkeypatch):
    """What is compiled is run by PyTorch's own kernels, without waiting for others."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    counters.clear()
    yield
    torch._dynamo.reset()


def make(path, compiled, rendezvous=None, **settings):
    backend = {"compile_layers": compiled}
    made = TrainSettings(max_tokens_per_microbatch=40, backend=backend, **settings)
    return Fsdp2TrainEngine(path, CONFIG, made, rendezvous)


def step(engine, seed):
    """On rows of other lengths each time."""
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in generator.integers(4, 30, 6 + seed)]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    batch = Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})
    result = engine.step(batch, lambda logprobs, columns: (-logprobs.sum() / 20, {}))
    return result.loss, result.grad_norm


def assert_steps_are_those_without(path, **settings):
    plain, compiled = make(path, False, **settings), make(path, True, **settings)
    assert [name for name, _ in compiled.named_weights()] == [name for name, _ in plain.named_weights()]
    for seed in STEPS:
        assert step(compiled, seed) == pytest.approx(step(plain, seed), rel=1e-5)
    for (_, one), (_, other) in zip(plain.named_weights(), compiled.named_weights(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.usefixtures("without_kernels")
def test_one_compilation_is_for_all_layers_and_lengths(model_path):
    assert_steps_are_those_without(model_path)
    assert 0 < counters["stats"]["unique_graphs"] <= GRAPHS


@pytest.mark.usefixtures("without_kernels")
def test_layers_may_be_recomputed(model_path):
    assert_steps_are_those_without(model_path, gradient_checkpointing=True)


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
def test_layers_may_have_adapters(model_path):
    pytest.importorskip("peft")
    assert_steps_are_those_without(model_path, lora=LoraSettings(rank=4))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
def test_steps_of_compiled_kernels_are_those_without(model_path, settings):
    torch._dynamo.reset()
    assert_steps_are_those_without(model_path, **settings)


def shards(rank, world_size, port, path, compiled):
    engine = make(path, compiled, Rendezvous(rank, world_size, "127.0.0.1", port))
    told = [step(engine, seed) for seed in STEPS]
    found = told, {name: tensor.numpy().copy() for name, tensor in engine.named_weights()}
    engine.close()
    return found


@pytest.mark.slow
def test_ranks_that_divide_the_model_may_compile_it(model_path):
    plain, compiled = (run(2, shards, model_path, compiled) for compiled in (False, True))
    for (told, weights), (wanted, others) in zip(compiled, plain, strict=True):
        assert np.allclose(told, wanted, rtol=1e-5)
        assert all(np.allclose(weights[name], others[name], atol=1e-5) for name in others)


def test_a_model_that_does_not_name_its_layers_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8))
    model._no_split_modules = None
    with pytest.raises(EngineError, match="GPT2LMHeadModel does not name its layers"):
        compile_layers(model)
