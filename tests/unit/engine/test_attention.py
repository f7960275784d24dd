# SPDX-License-Identifier: Apache-2.0
"""Attention over packed documents, each as if it were alone; the engine's own norms and rotary embeddings."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.cpu_kernels import RmsNorm, Rotation, install_cpu_kernels
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.attention import Documents, attend, can_pack, packed_attention
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
    packed = attend(query, key, value, Documents(tuple(lengths)), window=window)
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    expected = torch.cat([slow(*part, window) for part in parts], dim=1)
    assert torch.allclose(packed, expected, atol=1e-5)


def logits(model, rows, packed):
    """Compute the rows packed into one, or each by itself."""
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


def test_layers_that_cannot_be_packed_are_refused():
    unaware, capped = MODELS["llama"](), Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=4))
    unaware.set_attn_implementation(attention.NAME)
    capped.set_attn_implementation(attention.NAME)
    with pytest.raises(EngineError, match="LlamaAttention does not forward 'documents'"):
        unaware(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)
    with pytest.raises(EngineError, match="Gemma2Attention needs softcap"):
        logits(capped, [np.arange(4)], packed=True)


def test_models_with_other_layers_are_not_packed():
    model = MODELS["qwen2"]()
    model.config.layer_types = ["linear_attention", "full_attention"]
    assert not can_pack(model)


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 8, "factor": 2.0, "rope_theta": 10000.0,
            "short_factor": [1.0, 1.0], "long_factor": [4.0, 4.0]}  # fmt: skip


def test_models_with_dynamic_positions_are_not_packed():
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
def test_half_precision_on_a_host_uses_pytorchs_attention(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", None)
    query, key, value = torch.randn(3, 1, 4, 7, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    packed = attend(query, key, value, Documents((3, 4)))
    parts = zip(*(tensor.split([3, 4], dim=2) for tensor in (query, key, value)), strict=True)
    expected = [torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    assert torch.allclose(packed, torch.cat(expected, dim=2).transpose(1, 2), atol=2e-2)


# -- kernels of a CPU -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 7, 12), (2, 3, 5, 12), (12,)])
def test_a_norm_has_the_librarys_values_and_gradients(shape):
    generator = torch.Generator().manual_seed(0)
    layer = Qwen2RMSNorm(12, eps=1e-3).double()
    layer.weight.data.normal_(generator=generator)
    hidden, outer = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    first, second = (hidden.clone().requires_grad_() for _ in range(2))
    own = RmsNorm.apply(first, layer.weight, layer.variance_epsilon)
    (own * outer).sum().backward()
    by_weight, layer.weight.grad = layer.weight.grad, None
    # The library computes in float32 whatever it is given.
    plain = layer.weight * second / torch.sqrt(second.square().mean(-1, keepdim=True) + 1e-3)
    (plain * outer).sum().backward()
    assert torch.allclose(own, layer(hidden).double(), atol=1e-6)
    for result, expected in ((own, plain), (first.grad, second.grad), (by_weight, layer.weight.grad)):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_a_rotation_has_the_librarys_values_and_gradients():
    generator = torch.Generator().manual_seed(0)
    heads, outer = torch.randn(2, 2, 5, 3, 8, generator=generator, dtype=torch.float64)
    cos, sin = torch.randn(2, 2, 5, 8, generator=generator, dtype=torch.float64)
    first, second = (heads.clone().requires_grad_() for _ in range(2))
    own = Rotation.apply(first, cos, sin)
    plain = apply_rotary_pos_emb(second, second, cos, sin, unsqueeze_dim=2)[0]
    by_own, by_plain = (torch.autograd.grad(one, x, outer)[0] for one, x in ((own, first), (plain, second)))
    assert torch.allclose(own, plain, rtol=0, atol=1e-12)
    assert torch.allclose(by_own, by_plain, rtol=0, atol=1e-12)


OTHERS = {
    "llama": MODELS["llama"],
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, head_dim=4, sliding_window=4)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=4)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_own_kernels_give_a_packed_models_logits_and_gradients(kind):
    torch.manual_seed(0)
    model = OTHERS[kind]()
    model.set_attn_implementation(attention.NAME)
    ids = torch.randint(1, 50, (1, 9))
    packed = {"position_ids": torch.tensor([[*range(6), *range(3)]]), "documents": Documents((6, 3))}

    def computed():
        model.zero_grad()
        logits = model(ids, **packed, use_cache=False).logits
        logits.square().sum().backward()
        return [logits, *(parameter.grad for parameter in model.parameters())]

    expected = computed()
    install_cpu_kernels(model, packed_attention)
    for result, wanted in zip(computed(), expected, strict=True):
        assert torch.allclose(result, wanted, rtol=1e-4, atol=1e-6)


def test_own_kernels_are_not_used_in_bf16():
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (2, 9))
    model = OTHERS["qwen3"]()
    plain = model(ids).logits.detach()
    low = model.bfloat16()(ids).logits.detach()
    install_cpu_kernels(model, packed_attention)
    assert torch.equal(model(ids).logits, low)
    exact = model.float()(ids).logits
    kinds = ("RMSNorm", "Attention")
    assert not any(type(part).__name__.endswith(kinds) and "forward" not in vars(part) for part in model.modules())
    assert torch.allclose(exact, plain, atol=0.02)


def test_layers_of_another_kind_keep_the_librarys_kernels():
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=4))
    install_cpu_kernels(model, packed_attention)
    assert not any("forward" in vars(part) for part in model.modules())
