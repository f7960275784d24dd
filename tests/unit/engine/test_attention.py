# SPDX-License-Identifier: Apache-2.0
"""Attention over packed documents: each as if it were alone, in every kind of layer that can be packed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.attention import Documents, attend, can_pack
from dlrover.python.rl.engine.model.loading import prepare_training

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def slow(query, key, value, window):
    """Attention of one document, position by position."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows = []
    for at in range(query.shape[2]):
        seen = slice(max(0, at + 1 - (window or at + 1)), at + 1)
        scores = (query[:, :, at : at + 1] @ key[:, :, seen].transpose(2, 3)) / query.shape[-1] ** 0.5
        rows.append(scores.softmax(-1) @ value[:, :, seen])
    return torch.cat(rows, dim=2).transpose(1, 2)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sampled_from([None, 1, 3]), st.sampled_from([1, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_each_document_attends_to_itself_alone(lengths, window, heads):
    generator = torch.Generator().manual_seed(sum(lengths))
    query = torch.randn(1, 4, sum(lengths), 8, generator=generator)
    key, value = torch.randn(2, 1, heads, sum(lengths), 8, generator=generator)
    found = attend(query, key, value, Documents(tuple(lengths)), window=window)
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    expected = torch.cat([slow(*part, window) for part in parts], dim=1)
    assert torch.allclose(found, expected, atol=1e-5)


def logits(model, rows, packed):
    """Of the rows one after the other: packed into one, or each by itself."""
    if not packed:
        return torch.cat([model(input_ids=torch.tensor(row)[None], use_cache=False).logits[0] for row in rows])
    positions = np.concatenate([np.arange(len(row)) for row in rows])
    return model(
        input_ids=torch.tensor(np.concatenate(rows))[None],
        position_ids=torch.tensor(positions)[None],
        documents=Documents(tuple(map(len, rows))),
        use_cache=False,
    ).logits[0]


MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    ),
}


@pytest.mark.feature(58)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gives_the_logits_and_gradients_of_rows_alone(kind, checkpointing):
    torch.manual_seed(0)
    model = MODELS[kind]()
    if kind == "sliding":
        assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    generator = np.random.default_rng(0)
    rows = [generator.integers(1, 50, length) for length in (7, 7, 5, 1)]
    alone = logits(model, rows, packed=False)
    alone.square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert can_pack(model)
    model.set_attn_implementation(attention.NAME)
    if checkpointing:
        prepare_training(model, trained=True, recompute=True)
    packed = logits(model, rows, packed=True)
    assert torch.allclose(packed, alone, atol=1e-5)
    packed.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-6), name


def test_a_model_that_is_not_told_its_documents_is_refused():
    model = MODELS["llama"]()
    model.set_attn_implementation(attention.NAME)
    with pytest.raises(EngineError, match="LlamaAttention does not forward 'documents'"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)


def test_attention_of_another_kind_is_refused():
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=4, attn_logit_softcapping=50.0))
    model.set_attn_implementation(attention.NAME)
    with pytest.raises(EngineError, match="Gemma2Attention needs softcap"):
        logits(model, [np.arange(4)], packed=True)


def test_models_with_layers_that_are_no_attention_are_not_packed():
    model = MODELS["qwen2"]()
    model.config.layer_types = ["linear_attention", "full_attention"]
    assert not can_pack(model)


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 8, "factor": 2.0, "rope_theta": 10000.0,
            "short_factor": [1.0, 1.0], "long_factor": [4.0, 4.0]}  # fmt: skip


def test_models_whose_positions_depend_on_the_longest_row_are_not_packed():
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=16, rope_parameters=LONGROPE, initializer_range=0.5)
    model = LlamaForCausalLM(config)
    short, long = np.arange(1, 6), np.arange(1, 14)
    beside = logits(model, [short, short], packed=False)[: len(short)]
    together = model(input_ids=torch.tensor(np.stack([np.resize(short, len(long)), long])), use_cache=False).logits[0]
    assert not torch.allclose(together[: len(short)], beside, atol=1e-3), "the model does mix rows"
    assert not can_pack(model)
    layered = MODELS["qwen2"]()
    layered.config.rope_parameters = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}
    assert attention.find_fixed_positions(layered) == 8
    assert attention.find_fixed_positions(MODELS["llama"]()) is None


@pytest.mark.feature(143)
def test_on_a_host_half_precision_is_left_to_pytorchs_own_attention(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", None)
    query, key, value = torch.randn(3, 1, 4, 7, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = attend(query, key, value, Documents((3, 4)))
    parts = zip(*(tensor.split([3, 4], dim=2) for tensor in (query, key, value)), strict=True)
    expected = [torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    assert torch.allclose(found, torch.cat(expected, dim=2).transpose(1, 2), atol=2e-2)
