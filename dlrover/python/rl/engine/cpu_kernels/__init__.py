# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary embeddings and attention layers of models like Llama in fewer passes over memory, which limit the steps
of small models on a CPU as much as arithmetic; values and gradients are equal up to rounding."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch


class RmsNorm(torch.autograd.Function):
    """``y = w n`` with ``n = x / sqrt(mean x^2 + eps)`` (Zhang and Sennrich, arXiv:1910.07467, equation 4).

    Then ``dw = sum dy n`` and, with ``g = w dy``, ``dx = (g - n mean(g n)) / sqrt(mean x^2 + eps)``. LayerNorm's
    one-pass gradient with mean 0 is smaller by ``mean(g) / sqrt(mean x^2 + eps)``."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, eps: float) -> Any:
        norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        factor = norms.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, factor)
        return (hidden * factor).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, None]:
        hidden, weight, factor = ctx.saved_tensors
        centre, shape = torch.zeros_like(factor), weight.shape
        by_hidden, by_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, hidden, shape, centre, factor, weight, None, [True, True, False]
        )
        lacking = torch.matmul(gradient, weight).div_(len(weight)).unsqueeze(-1)
        return by_hidden.addcmul_(lacking, factor), by_weight, None


Attention: TypeAlias = Callable[..., tuple[Any, Any]]
"""An attention function in the form of ``transformers.AttentionInterface``."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with these norms and attention."""


def install_cpu_kernels(module: Any, attention: Attention) -> None:
    """Replace a Hugging Face model's norms and attention in place; other models and devices do not change."""
    if module.config.get_text_config().model_type in FAMILIES:
        for part in module.modules():
            if type(part).__name__.endswith("RMSNorm"):
                part.forward = MethodType(_norm, part)
            elif type(part).__name__.endswith("Attention"):
                part.forward = MethodType(partial(_attention, attention), part)


def _is_float32_on_host(*tensors: Any) -> bool:
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def _norm(layer: Any, hidden: Any) -> Any:
    if not _is_float32_on_host(hidden, layer.weight):
        return type(layer).forward(layer, hidden)
    return RmsNorm.apply(hidden, layer.weight, layer.variance_epsilon)


def _attention(
    attention: Attention,
    layer: Any,
    hidden_states: Any,
    position_embeddings: tuple[Any, Any],
    attention_mask: Any = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    if "documents" not in options or past_key_values is not None or not _is_float32_on_host(hidden_states):
        arguments = (hidden_states, position_embeddings, attention_mask, past_key_values)
        return type(layer).forward(layer, *arguments, **options)
    shape = (*hidden_states.shape[:-1], -1, layer.head_dim)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    query, key, value = (projection(hidden_states).view(shape) for projection in projections)
    if hasattr(layer, "q_norm"):
        query, key = layer.q_norm(query), layer.k_norm(key)
    query, key = (Rotation.apply(tensor, *position_embeddings) for tensor in (query, key))
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output, _ = attention(
        layer,
        query,
        key,
        value,
        attention_mask,
        dropout=layer.attention_dropout if layer.training else 0.0,
        scaling=layer.scaling,
        sliding_window=getattr(layer, "sliding_window", getattr(layer.config, "sliding_window", None)),
        **options,
    )
    return layer.o_proj(output.flatten(2)), None


class Rotation(torch.autograd.Function):
    """Rotary position embedding (Su et al., arXiv:2104.09864): with ``x``, ``c = cos`` and ``s = sin`` in halves,
    ``y_1 = c_1 x_1 - s_1 x_2`` and ``y_2 = c_2 x_2 + s_2 x_1``. Then ``dx_1 = c_1 dy_1 + s_2 dy_2`` and
    ``dx_2 = c_2 dy_2 - s_1 dy_1``."""

    @staticmethod
    def forward(ctx: Any, heads: Any, cos: Any, sin: Any) -> Any:
        """``heads`` ``[rows, tokens, heads, dim]``, ``cos`` and ``sin`` ``[rows, tokens, dim]``."""
        first, second = sin.chunk(2, dim=-1)
        ctx.save_for_backward(cos, first, second)
        return _rotate(heads, cos, -first, second)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None]:
        cos, first, second = ctx.saved_tensors
        return _rotate(gradient, cos, second, -first), None, None


def _rotate(heads: Any, cos: Any, first: Any, second: Any) -> Any:
    output = torch.mul(heads, cos.unsqueeze(2), out=heads.new_empty(heads.shape))
    (into_1, into_2), (from_1, from_2) = output.chunk(2, dim=-1), heads.chunk(2, dim=-1)
    into_1.addcmul_(from_2, first.unsqueeze(2))
    into_2.addcmul_(from_1, second.unsqueeze(2))
    return output
