# SPDX-License-Identifier: Apache-2.0
"""``compile_layers``: the same results up to rounding, of one compilation for all layers and batches."""

import functools

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine, compile_layers
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.processes import run

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that Dynamo looks at

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)
LAYERS = 3
GRAPHS = 4  # a norm, an MLP, and attention before its core and after it
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


def batch_of(seed):
    """Rows of other lengths each time."""
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, length) for length in generator.integers(4, 30, 6 + seed)]
    mask = [np.arange(len(row)) >= 2 for row in tokens]
    return Batch({"tokens": Ragged.from_rows(tokens), "action_mask": Ragged.from_rows(mask)})


def step(engine, seed):
    result = engine.step(batch_of(seed), lambda logprobs, columns: (-logprobs.sum() / 20, {}))
    return result.loss, result.grad_norm


def assert_results_are_those_without(path, **settings):
    plain, compiled = make(path, False, **settings), make(path, True, **settings)
    assert [name for name, _ in compiled.named_weights()] == [name for name, _ in plain.named_weights()]
    for seed in STEPS:
        assert step(compiled, seed) == pytest.approx(step(plain, seed), rel=1e-5)
        outputs = (engine.evaluate(batch_of(seed)).ragged("logprobs").values for engine in (compiled, plain))
        assert np.allclose(*outputs, atol=1e-5)
    for (_, one), (_, other) in zip(plain.named_weights(), compiled.named_weights(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("recomputes", [False, True])
def test_one_compilation_is_for_all_layers_and_lengths_and_one_for_passes_without_gradients(model_path, recomputes):
    assert_results_are_those_without(model_path, gradient_checkpointing=recomputes)
    assert GRAPHS <= counters["stats"]["unique_graphs"] < LAYERS * GRAPHS


def attention_calls(engine, monkeypatch):
    """In a step."""
    calls, attend = [], attention.attend
    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend", lambda *given: calls.append(None) or attend(*given))
        step(engine, 0)
    return len(calls)


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
def test_layers_are_recomputed_as_often_as_without(model_path, monkeypatch):
    once = attention_calls(make(model_path, True), monkeypatch)
    twice, plain = (
        attention_calls(make(model_path, compiled, gradient_checkpointing=True), monkeypatch)
        for compiled in (True, False)
    )
    assert twice == plain == 2 * once


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
def test_layers_may_have_adapters(model_path):
    pytest.importorskip("peft")
    assert_results_are_those_without(model_path, lora=LoraSettings(rank=4))


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
def test_layers_may_be_in_4_bits(model_path):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    assert_results_are_those_without(model_path, lora=LoraSettings(rank=4, quantize_base="nf4"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
def test_steps_of_compiled_kernels_are_those_without(model_path, settings):
    torch._dynamo.reset()
    assert_results_are_those_without(model_path, **settings)


def shards(rank, world_size, port, path, compiled):
    engine = make(path, compiled, Rendezvous(rank, world_size, "127.0.0.1", port), gradient_checkpointing=True)
    with pytest.MonkeyPatch.context() as patch:
        calls = attention_calls(engine, patch)
    results = [step(engine, seed) for seed in STEPS]
    found = calls, results, {name: tensor.numpy().copy() for name, tensor in engine.named_weights()}
    engine.close()
    return found


@pytest.mark.slow
def test_ranks_that_divide_the_model_may_compile_it(model_path):
    plain, compiled = (run(2, shards, model_path, compiled) for compiled in (False, True))
    for (calls, results, weights), (calls_without, wanted, others) in zip(compiled, plain, strict=True):
        assert calls == calls_without
        assert np.allclose(results, wanted, rtol=1e-5)
        assert all(np.allclose(weights[name], others[name], atol=1e-5) for name in others)


def test_ranks_that_split_matrices_may_not(model_path):
    backend, sizes = {"compile_layers": True}, ParallelSizes(tensor_parallel_size=2)
    with pytest.raises(EngineError, match="compile_layers needs tensor_parallel_size 1, not 2"):
        Fsdp2TrainEngine(model_path, CONFIG, TrainSettings(parallel=sizes, backend=backend))


def test_a_model_that_does_not_name_its_layers_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8))
    model._no_split_modules = None
    with pytest.raises(EngineError, match="GPT2LMHeadModel does not name its layers"):
        compile_layers(model)
