"""RMSNorm in fewer passes over memory than the library's. Values and gradients are the same up to rounding."""

from typing import Any

import torch


class RmsNorm(torch.autograd.Function):
    """``y = w n`` with ``n = x / sqrt(mean x^2 + eps)`` (Zhang and Sennrich, arXiv:1910.07467, equation 4).

    Then ``dw = sum dy n`` and, with ``g = w dy``, ``dx = (g - n mean(g n)) / sqrt(mean x^2 + eps)``. That of LayerNorm
    about a mean of 0, which is computed in one pass, is smaller by ``mean(g) / sqrt(mean x^2 + eps)``.
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
        centre, shape = torch.zeros_like(factor), weight.shape
        by_hidden, by_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, hidden, shape, centre, factor, weight, None, [True, True, False]
        )
        lacking = torch.matmul(gradient, weight).div_(len(weight)).unsqueeze(-1)
        return by_hidden.addcmul_(lacking, factor), by_weight, None
