# SPDX-License-Identifier: Apache-2.0
"""Norms and rotary embeddings of the engine's own against the library's and the plain formulas."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from dlrover.python.rl.engine.cpu_kernels import RmsNorm, Rotation, install_cpu_kernels
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.attention import Documents, packed_attention

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("shape", [(1, 7, 12), (2, 3, 5, 12), (12,)])
def test_values_and_gradients_of_a_norm_are_the_librarys(shape):
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
    for found, expected in ((own, plain), (first.grad, second.grad), (by_weight, layer.weight.grad)):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_values_and_gradients_of_a_rotation_are_the_librarys():
    generator = torch.Generator().manual_seed(0)
    heads, outer = torch.randn(2, 2, 5, 3, 8, generator=generator, dtype=torch.float64)
    cos, sin = torch.randn(2, 2, 5, 8, generator=generator, dtype=torch.float64)
    first, second = (heads.clone().requires_grad_() for _ in range(2))
    own = Rotation.apply(first, cos, sin)
    plain = apply_rotary_pos_emb(second, second, cos, sin, unsqueeze_dim=2)[0]
    by_own, by_plain = (torch.autograd.grad(one, x, outer)[0] for one, x in ((own, first), (plain, second)))
    assert torch.allclose(own, plain, rtol=0, atol=1e-12)
    assert torch.allclose(by_own, by_plain, rtol=0, atol=1e-12)


MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_packed_model_gives_the_same_logits_and_gradients(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
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
    for found, wanted in zip(computed(), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_models_parts_give_the_same_and_stay_the_librarys_in_bf16():
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (2, 9))
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    plain = model(ids).logits.detach()
    low = model.bfloat16()(ids).logits.detach()
    install_cpu_kernels(model, packed_attention)
    assert torch.equal(model(ids).logits, low)
    found = model.float()(ids).logits
    kinds = ("RMSNorm", "Attention")
    assert not any(type(part).__name__.endswith(kinds) and "forward" not in vars(part) for part in model.modules())
    assert torch.allclose(found, plain, atol=0.02)


def test_parts_of_another_kind_are_left_alone():
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE))
    install_cpu_kernels(model, packed_attention)
    assert not any("forward" in vars(part) for part in model.modules())
