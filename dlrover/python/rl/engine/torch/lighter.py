"""Parts of models like Llama that compute in fewer passes over memory than the library's, in float32 on a host.

There a step of a small model waits for memory as much as for arithmetic, and the library's norms and rotary embeddings
read and write whole activations a dozen times. Values and gradients are the same up to rounding.
"""

from types import MethodType
from typing import Any

import torch

from dlrover.python.rl.engine.torch.attention import packed_attention
from dlrover.python.rl.engine.torch.norms import RmsNorm

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of models whose parts are known to be these."""


def lighten(module: Any) -> None:
    """Let a Hugging Face model's norms and attention compute so where they can, in place; other models are left alone,
    and so are other devices and precisions."""
    if module.config.get_text_config().model_type in FAMILIES:
        for part in module.modules():
            if type(part).__name__.endswith("RMSNorm"):
                part.forward = MethodType(_norm, part)
            elif type(part).__name__.endswith("Attention"):
                part.forward = MethodType(_attention, part)


def _in_float32_on_a_host(*tensors: Any) -> bool:
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def _norm(layer: Any, hidden: Any) -> Any:
    if not _in_float32_on_a_host(hidden, layer.weight):
        return type(layer).forward(layer, hidden)
    return RmsNorm.apply(hidden, layer.weight, layer.variance_epsilon)


def _attention(
    layer: Any,
    hidden_states: Any,
    position_embeddings: tuple[Any, Any],
    attention_mask: Any = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """In the form that Transformers calls; packed documents alone."""
    if "documents" not in options or past_key_values is not None or not _in_float32_on_a_host(hidden_states):
        given = (hidden_states, position_embeddings, attention_mask, past_key_values)
        return type(layer).forward(layer, *given, **options)
    shape = (*hidden_states.shape[:-1], -1, layer.head_dim)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    query, key, value = (projection(hidden_states).view(shape) for projection in projections)
    if hasattr(layer, "q_norm"):
        query, key = layer.q_norm(query), layer.k_norm(key)
    query, key = (Rotation.apply(tensor, *position_embeddings) for tensor in (query, key))
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    found, _ = packed_attention(
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
    return layer.o_proj(found.flatten(2)), None


class Rotation(torch.autograd.Function):
    """Rotary position embedding (Su et al., arXiv:2104.09864): with ``x``, ``c = cos`` and ``s = sin`` in halves,
    ``y_1 = c_1 x_1 - s_1 x_2`` and ``y_2 = c_2 x_2 + s_2 x_1``.

    Then ``dx_1 = c_1 dy_1 + s_2 dy_2`` and ``dx_2 = c_2 dy_2 - s_1 dy_1``.
    """

    @staticmethod
    def forward(ctx: Any, heads: Any, cos: Any, sin: Any) -> Any:
        """``heads`` ``[rows, tokens, heads, dim]``, ``cos`` and ``sin`` ``[rows, tokens, dim]``."""
        first, second = sin.chunk(2, dim=-1)
        ctx.save_for_backward(cos, first, second)
        return _turned(heads, cos, -first, second)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None]:
        """As ``heads``."""
        cos, first, second = ctx.saved_tensors
        return _turned(gradient, cos, second, -first), None, None


def _turned(heads: Any, cos: Any, first: Any, second: Any) -> Any:
    """``cos x`` plus the product of ``x_2`` with ``first``, and of ``x_1`` with ``second``: contiguous."""
    found = torch.mul(heads, cos.unsqueeze(2), out=heads.new_empty(heads.shape))
    (into_1, into_2), (from_1, from_2) = found.chunk(2, dim=-1), heads.chunk(2, dim=-1)
    into_1.addcmul_(from_2, first.unsqueeze(2))
    into_2.addcmul_(from_1, second.unsqueeze(2))
    return found
