# SPDX-License-Identifier: Apache-2.0
"""Log-probs by chunks: the values and gradients of all logits at once, in memory that does not grow with them."""

import json
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model import chunked_head
from dlrover.python.rl.engine.model.chunked_head import ChunkedHead, ChunkedLogprobs
from dlrover.python.rl.engine.model.outputs import token_logprobs
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.processes import run

TOKENS, WIDTH, VOCAB = 13, 5, 11
WEIGHTS = 32


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("count", [1, 3], ids=["one id a token", "three"])
@pytest.mark.parametrize("trains", [(True, False), (True, True), (False, True)], ids=["log-probs", "both", "entropy"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", [1, 4, 13])
def test_chunks_have_the_values_and_gradients_of_all_logits(count, trains, has_bias, rows):
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    slopes, targets = (draw(TOKENS, count), draw(TOKENS)), torch.randint(VOCAB, (TOKENS, count), generator=generator)
    factors = [draw(TOKENS, WIDTH), draw(VOCAB, WIDTH), draw(VOCAB) if has_bias else None]

    def score(logits, ids):
        return token_logprobs(logits, ids, 0.7, True)

    def outcome(compute):
        leaves = [None if factor is None else factor.clone().requires_grad_() for factor in factors]
        outputs = compute(*leaves)
        parts = zip(trains, slopes, outputs, strict=True)
        sum((slope * output).sum() for is_trained, slope, output in parts if is_trained).backward()
        return [*(each.detach() for each in outputs), *(leaf.grad for leaf in leaves if leaf is not None)]

    whole = outcome(lambda *leaves: score(functional.linear(*leaves), targets))

    def compute(*leaves):
        logprobs, entropies = ChunkedLogprobs.apply(*leaves, targets, score, rows)
        return logprobs[0], entropies

    chunks = outcome(compute)
    for result, expected in zip(chunks, whole, strict=True):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def batch_of(rows=6, length=20, candidates=0):
    generator = np.random.default_rng(0)
    columns = {
        "tokens": Ragged.from_rows([generator.integers(0, 256, length) for _ in range(rows)]),
        "action_mask": Ragged.from_rows([np.arange(length) >= 4 for _ in range(rows)]),
    }
    if candidates:
        ids = [generator.integers(0, 256, (length, candidates)) for _ in range(rows)]
        columns["candidates"] = Ragged.from_rows(ids)
    return Batch({**columns, "weight": np.full(rows, 1 / 96, dtype=np.float32)})


class Loss:
    wants_entropy = True

    def __call__(self, logprobs, columns):
        more = columns["candidate_logprobs"].sum() if "candidate_logprobs" in columns else 0.0
        return -(columns["weight"] * (logprobs + 0.1 * columns["entropy"])).sum() - 1e-3 * more, {}


def train(model, settings=None, candidates=0):
    """Log-probs and entropies, and the weights after two steps."""
    engine = Fsdp2TrainEngine(model, OptimizerConfig(name="sgd", lr=0.1), settings)
    batch = batch_of(candidates=candidates)
    outputs = engine.evaluate(batch, 0.7, entropy=True)
    for _ in range(2):
        engine.step(batch, Loss(), 0.7)
    columns = [outputs.ragged(name).values for name in outputs.columns]
    return [*columns, *(tensor.detach().float().numpy().copy() for _, tensor in engine.named_weights())]


@pytest.mark.parametrize("candidates", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"lora": LoraSettings(rank=2)}])
def test_an_engine_trains_the_same_weights_by_chunks(tmp_path, monkeypatch, settings, candidates):
    if "lora" in settings:
        pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    model = write_tiny_model(tmp_path / "T", hidden=32, layers=2, max_positions=64, rows=300)  # some are masked
    expected = train(model, TrainSettings(**settings), candidates)
    monkeypatch.setattr(chunked_head, "CHUNK_ELEMENTS", 7 * 300)
    for chunks, whole in zip(train(model, TrainSettings(**settings), candidates), expected, strict=True):
        np.testing.assert_allclose(chunks, whole, rtol=0, atol=2e-6)


def _steps(rank, world_size, port, model, precision, chunk, rows):
    """Take two steps on this rank's rows; return the weights and the warnings."""
    chunked_head.CHUNK_ELEMENTS = chunk
    settings = TrainSettings(precision=precision)
    rendezvous = Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=120)
    engine = Fsdp2TrainEngine(model, OptimizerConfig(name="sgd", lr=0.1), settings, rendezvous)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.step(batch_of(rows).split(world_size)[rank], Loss(), 0.7)
    weights = [tensor.detach().numpy().copy() for _, tensor in engine.named_weights()]
    engine.close()
    return weights, [str(one.message) for one in caught if "FSDP" in str(one.message)]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-6), ("bf16", 2e-4)])
def test_ranks_train_the_same_weights_by_chunks(tmp_path, precision, tolerance):
    model = write_tiny_model(tmp_path / "T", hidden=32, layers=2, max_positions=64)
    chunks, whole = (run(2, _steps, model, precision, chunk, 6) for chunk in (7 * 300, 1 << 29))
    for (weights, messages), (expected, _) in zip(chunks, whole, strict=True):
        assert messages == []
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def test_a_measured_entropy_has_no_gradient(tmp_path, monkeypatch):
    model = write_tiny_model(tmp_path / "T", hidden=32, layers=1, max_positions=64)
    monkeypatch.setattr(chunked_head, "CHUNK_ELEMENTS", 7 * 300)
    needed, backward = [], chunked_head.ChunkedLogprobs.backward

    def noting(ctx, by_logprob, by_entropy):
        needed.append((by_logprob is not None, by_entropy is not None))
        return backward(ctx, by_logprob, by_entropy)

    class Measuring(Loss):
        def __call__(self, logprobs, columns):
            return -(columns["weight"] * logprobs).sum(), {"entropy": columns["entropy"].sum()}

    monkeypatch.setattr(chunked_head.ChunkedLogprobs, "backward", staticmethod(noting))
    engine = Fsdp2TrainEngine(model, OptimizerConfig(lr=1e-3))
    assert engine.step(batch_of(), Measuring()).metrics["entropy"] > 0
    engine.step(batch_of(), Loss())
    assert needed == [(True, False), (True, True)]


class Largest(TorchDispatchMode):
    """Records the most elements of a tensor of logits; those with ``WEIGHTS`` rows are the output layer's."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.elements = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocabulary,) and len(tensor) != WEIGHTS:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("tokens", [5, 20, 96])
def test_no_more_logits_are_held_than_a_chunk_has(tmp_path, monkeypatch, tokens):
    model = write_tiny_model(tmp_path / "T", hidden=WEIGHTS, layers=1, max_positions=64)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    monkeypatch.setattr(chunked_head, "CHUNK_ELEMENTS", tokens * vocabulary)
    engine = Fsdp2TrainEngine(model, OptimizerConfig(lr=1e-3))
    sizes = []

    def note(tensor):
        if tensor.shape[-1:] == (vocabulary,) and len(tensor) != WEIGHTS:
            sizes.append(tensor.numel())
        return tensor

    with Largest(vocabulary) as seen, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.step(batch_of(), Loss())
    assert seen.elements == max(sizes) == tokens * vocabulary


def test_a_model_with_changed_logits_has_no_chunks():
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma2Config(vocab_size=32, intermediate_size=16, head_dim=8, **small)
    assert ChunkedHead.of(Gemma2ForCausalLM(config)) is None
