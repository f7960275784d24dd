"""RMSNorm in fewer passes over memory than the library's, in float32 on a host.

There a step of a small model waits for memory as much as for arithmetic, and the library's norm reads and writes whole
activations a dozen times. Values and gradients are the same up to rounding.
"""

from types import MethodType
from typing import Any

import torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of models whose norms are known to be :class:`RmsNorm`."""

CACHED_ELEMENTS = 1 << 16
"""Elements of an activation that are worked on at a time in the backward pass."""


def lighten(module: Any) -> None:
    """Let a Hugging Face model's norms compute by :class:`RmsNorm` where they can, in place; other models are left
    alone, and so are other devices and precisions."""
    if module.config.get_text_config().model_type in FAMILIES:
        for part in module.modules():
            if type(part).__name__.endswith("RMSNorm"):
                part.forward = MethodType(_forward, part)


def _forward(layer: Any, hidden: Any) -> Any:
    if hidden.device.type != "cpu" or hidden.dtype != torch.float32 or layer.weight.dtype != torch.float32:
        return type(layer).forward(layer, hidden)
    return RmsNorm.apply(hidden, layer.weight, layer.variance_epsilon)


class RmsNorm(torch.autograd.Function):
    """``y = w n`` with ``n = x / sqrt(mean x^2 + eps)`` (Zhang and Sennrich, arXiv:1910.07467, equation 4).

    Then ``dw = sum dy n`` and, with ``g = w dy``, ``dx = (g - n mean(g n)) / sqrt(mean x^2 + eps)``.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, eps: float) -> Any:
        """``hidden`` ``[..., width]``, ``weight`` ``[width]``."""
        norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        factor = norms.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, factor)
        return (hidden * factor).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, None]:
        """``gradient`` ``[..., width]``; gives those of ``hidden`` and ``weight``."""
        hidden, weight, factor = ctx.saved_tensors
        width = len(weight)
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (hidden, factor, gradient)]
        by_hidden, by_weight = torch.empty_like(rows[0]), torch.zeros_like(weight)
        parts = [tensor.split(max(1, CACHED_ELEMENTS // width)) for tensor in (*rows, by_hidden)]
        for inputs, scale, outer, found in zip(*parts, strict=True):
            normed = inputs * scale
            product = outer * normed
            by_weight += product.sum(dim=0)
            torch.mul(outer, weight, out=found)
            found.addcmul_(normed, (product @ weight).div_(-width)[:, None]).mul_(scale)
        return by_hidden.view(hidden.shape), by_weight, None
