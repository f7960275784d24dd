# SPDX-License-Identifier: Apache-2.0
"""``compile_layers``: the same results up to rounding, of one compilation for all layers and batches."""

import functools

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine, compile_layers
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.fsdp2_toys import make_batch, token_loss
from tests.support.processes import run
from tests.support.train_exercise import weights_of

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
    """Compiled code is run by PyTorch's own kernels, without waiting for others."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    counters.clear()
    yield
    torch._dynamo.reset()


def make(path, compiled, rendezvous=None, **settings):
    backend = {"compile_layers": compiled}
    settings = TrainSettings(max_tokens_per_microbatch=40, backend=backend, **settings)
    return Fsdp2TrainEngine(path, CONFIG, settings, rendezvous)


def batch_of(seed):
    """Rows of other lengths each time."""
    return make_batch(seed, np.random.default_rng(seed).integers(4, 30, 6 + seed))


def step(engine, seed):
    result = engine.step(batch_of(seed), token_loss)
    return result.loss, result.grad_norm


def assert_results_are_equal(path, **settings):
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
def test_one_compilation_is_for_all_layers_and_lengths(model_path, recomputes):
    """Another one is for passes without gradients."""
    assert_results_are_equal(model_path, gradient_checkpointing=recomputes)
    assert GRAPHS <= counters["stats"]["unique_graphs"] < LAYERS * GRAPHS


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("base", [None, "nf4"])
def test_compiled_layers_may_have_adapters(model_path, base):
    pytest.importorskip("peft")
    if base:
        pytest.importorskip("bitsandbytes")
    assert_results_are_equal(model_path, lora=LoraSettings(rank=4, quantize_base=base))


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_kernels_give_the_same_steps(model_path, recomputes):
    torch._dynamo.reset()
    assert_results_are_equal(model_path, gradient_checkpointing=recomputes)


def attention_calls(engine, monkeypatch):
    """Count the calls in a step."""
    calls, attend = [], attention.attend
    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend", lambda *args: calls.append(None) or attend(*args))
        step(engine, 0)
    return len(calls)


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
def test_compiled_layers_are_recomputed_as_often(model_path, monkeypatch):
    once = attention_calls(make(model_path, True), monkeypatch)
    twice, plain = (
        attention_calls(make(model_path, compiled, gradient_checkpointing=True), monkeypatch)
        for compiled in (True, False)
    )
    assert twice == plain == 2 * once


def shards(rank, world_size, port, path, compiled):
    engine = make(path, compiled, Rendezvous(rank, world_size, "127.0.0.1", port), gradient_checkpointing=True)
    with pytest.MonkeyPatch.context() as patch:
        calls = attention_calls(engine, patch)
    results = [step(engine, seed) for seed in STEPS]
    outcome = calls, results, weights_of(engine)
    engine.close()
    return outcome


@pytest.mark.slow
def test_ranks_that_shard_the_model_may_compile_it(model_path):
    plain, compiled = (run(2, shards, model_path, compiled) for compiled in (False, True))
    for (calls, results, weights), (plain_calls, wanted, expected) in zip(compiled, plain, strict=True):
        assert calls == plain_calls
        assert np.allclose(results, wanted, rtol=1e-5)
        assert all(np.allclose(weights[name], expected[name], atol=1e-5) for name in expected)


def test_a_model_without_names_of_its_layers_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8))
    model._no_split_modules = None
    with pytest.raises(EngineError, match="GPT2LMHeadModel does not name its layers"):
        compile_layers(model)
