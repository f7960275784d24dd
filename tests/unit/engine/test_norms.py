"""RMSNorm of the engine's own against the library's."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from dlrover.python.rl.engine.torch import norms
from dlrover.python.rl.engine.torch.norms import RmsNorm, lighten

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
@pytest.mark.parametrize("cached", [1, 30, 1 << 16])
def test_values_and_gradients_are_the_librarys(shape, cached, monkeypatch):
    monkeypatch.setattr(norms, "CACHED_ELEMENTS", cached)
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


def test_a_models_norms_give_the_same_and_stay_the_librarys_in_bf16():
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (2, 9))
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    plain = model(ids).logits.detach()
    low = model.bfloat16()(ids).logits.detach()
    lighten(model)
    assert torch.equal(model(ids).logits, low)
    found = model.float()(ids).logits
    assert not any(type(part).__name__.endswith("RMSNorm") and "forward" not in vars(part) for part in model.modules())
    assert torch.allclose(found, plain, atol=0.02)


def test_norms_of_another_kind_are_left_alone():
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE))
    lighten(model)
    assert not any("forward" in vars(part) for part in model.modules())
