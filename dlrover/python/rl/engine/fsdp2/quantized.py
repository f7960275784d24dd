# SPDX-License-Identifier: Apache-2.0
"""Frozen matrices in 4 bits through bitsandbytes: 4-bit NormalFloat in blocks (Dettmers et al., arXiv:2305.14314,
section 3), without quantizing the scales again.

They are restored as rows of one block each: the library's kernel for AVX-512 gives wrong values where a row ends within
a block.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.registry import require_bitsandbytes
from dlrover.python.rl.engine.fsdp2.compiled_layers import layers_of

BLOCK = 64
"""Numbers with one scale in float32."""


class QuantizedLinear(torch.nn.Linear):
    """A linear layer that is not trained; its bias stays as it is. ``weight`` has two numbers in a byte, in whole
    blocks."""

    def __init__(self, plain: torch.nn.Linear, precision: torch.dtype) -> None:
        """``plain`` is on the meta device, and so is ``weight``, to which :meth:`store` gives values. The numbers have
        ``precision`` before and after."""
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.bias, self.precision = plain.bias, precision
        self.shape, count = plain.weight.shape, plain.weight.numel()
        blocks = -(-count // BLOCK)
        packed = torch.empty(blocks * BLOCK // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", torch.zeros(blocks), persistent=False)

    @torch.no_grad()
    def store(self, weight: Any) -> None:
        """Quantize a whole weight. The same weight, precision and kind of device give the same bits."""
        from bitsandbytes.functional import quantize_4bit

        there = weight.to(self.weight.device, self.precision).contiguous()
        packed, state = quantize_4bit(there, blocksize=BLOCK, quant_type="nf4")
        self.weight[: len(packed)].copy_(packed)
        self.weight[len(packed) :].zero_()
        self.scales.copy_(state.absmax)

    def restored(self, locate: Callable[[Any], Any]) -> Any:
        """The weight that the layer computes with; ``locate`` gives the memory of its parts."""
        return _restore(locate(self.weight.detach()), locate(self.scales), self.shape, self.precision)

    def forward(self, input: Any) -> Any:
        return _Product.apply(input, self.weight, self.scales, self.bias, self.shape, self.precision)


def _restore(packed: Any, scales: Any, shape: torch.Size, precision: torch.dtype) -> Any:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    blocks = torch.Size((len(scales), BLOCK))
    numbers = dequantize_4bit(packed, QuantState(scales, blocks, blocksize=BLOCK, quant_type="nf4", dtype=precision))
    return numbers.flatten()[: shape.numel()].view(shape)


class _Product(torch.autograd.Function):
    """``input @ weight.T + bias`` of a weight that each pass restores."""

    @staticmethod
    def forward(  # type: ignore[override] # noqa: PLR0913 - a layer's parts
        ctx: Any, input: Any, packed: Any, scales: Any, bias: Any, shape: torch.Size, precision: torch.dtype
    ) -> Any:
        ctx.save_for_backward(packed, scales)
        ctx.shape, ctx.precision = shape, precision
        return functional.linear(input, _restore(packed, scales, shape, precision), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        packed, scales = ctx.saved_tensors
        return gradient @ _restore(packed, scales, ctx.shape, ctx.precision), None, None, None, None, None


def quantize_linear_layers(module: Any, precision: torch.dtype) -> None:
    """Replace the linear layers inside the decoder layers of a module on the meta device.

    Raises:
        MissingExtra: bitsandbytes is not installed, or is too old.
        EngineError: the module does not name its layers.
    """
    require_bitsandbytes()
    if not (layers := layers_of(module)):
        raise EngineError(f"{type(module).__name__} does not name its layers: they cannot be quantized")
    for owner in (part for layer in layers for part in layer.modules()):
        for name, part in owner.named_children():
            if type(part) is torch.nn.Linear:
                setattr(owner, name, QuantizedLinear(part, precision))
