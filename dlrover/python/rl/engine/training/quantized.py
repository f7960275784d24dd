# SPDX-License-Identifier: Apache-2.0
"""Frozen matrices in 4 bits through bitsandbytes: 4-bit NormalFloat in blocks (Dettmers et al., arXiv:2305.14314,
section 3), without quantizing the scales again.

They are restored as rows of one block each: the library's kernel for AVX-512 gives wrong values where a row ends within
a block.

::

    weight      a row for each rank that divides it, its bytes as numbers of the passes' precision, which FSDP and
                ZeRO gather as they are
    a row       its share of the blocks, 32 bytes each | their scales, 4 bytes each
"""

from typing import Any

import torch
from torch.nn import functional

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.registry import require_bitsandbytes
from dlrover.python.rl.engine.model.loading import layers_of

BLOCK = 64
"""Numbers with one scale in float32."""

_PACKED = BLOCK // 2  # bytes


class QuantizedLinear(torch.nn.Linear):
    """A linear layer that is not trained; its bias stays as it is. ``weight`` is in ``parts`` of equal size."""

    def __init__(self, plain: torch.nn.Linear, precision: torch.dtype, parts: int = 1) -> None:
        """``plain`` is on the meta device, and so is ``weight``, which :meth:`store` fills. The numbers have
        ``precision`` before and after."""
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.bias, self.shape = plain.bias, plain.weight.shape
        blocks = -(-plain.weight.numel() // (parts * BLOCK))
        self.numbers = blocks * BLOCK  # of a part, the last ones of which may have fewer
        row = torch.empty(parts, blocks * (_PACKED + 4) // precision.itemsize, dtype=precision, device="meta")
        self.weight = torch.nn.Parameter(row, requires_grad=False)

    def rows_of(self, part: int) -> slice:
        """The rows of the whole weight that have a part's numbers."""
        start, stop = self._span(part)
        return slice(start // self.in_features, -(-stop // self.in_features))

    def _span(self, part: int) -> tuple[int, int]:
        count = self.shape.numel()
        return min(part * self.numbers, count), min((part + 1) * self.numbers, count)

    @torch.no_grad()
    def store(self, rows: Any, memory: Any, part: int = 0) -> None:
        """Quantize a part, given its :meth:`rows_of`, into its row of ``weight``. The same weight, precision and kind
        of device give the same bits, in any number of parts."""
        from bitsandbytes.functional import quantize_4bit

        start, stop = (bound - self.rows_of(part).start * self.in_features for bound in self._span(part))
        packed, scales = _views(memory.zero_())
        if start == stop:
            return
        there = rows.to(memory.device, memory.dtype).flatten()[start:stop].contiguous()
        quantized, state = quantize_4bit(there, blocksize=BLOCK, quant_type="nf4")
        packed[: len(quantized)].copy_(quantized.flatten())
        scales[: len(state.absmax)].copy_(state.absmax)

    def restored(self, weight: Any) -> Any:
        """The matrix that the layer computes with, from all parts of its ``weight``."""
        return _restore(weight, self.shape)

    def forward(self, input: Any) -> Any:
        return _Product.apply(input, self.weight, self.bias, self.shape)


def _views(weight: Any) -> tuple[Any, Any]:
    """The packed numbers and the scales of all parts, each in one row; of a single part both share its memory."""
    content = weight.detach().view(torch.uint8)
    cut = content.shape[-1] // (_PACKED + 4) * _PACKED
    return content[..., :cut].reshape(-1), content[..., cut:].reshape(-1).view(torch.float32)


def _restore(weight: Any, shape: torch.Size) -> Any:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    packed, scales = _views(weight)
    blocks = torch.Size((len(scales), BLOCK))
    state = QuantState(scales, blocks, blocksize=BLOCK, quant_type="nf4", dtype=weight.dtype)
    return dequantize_4bit(packed.unsqueeze(1), state).flatten()[: shape.numel()].view(shape)


class _Product(torch.autograd.Function):
    """``input @ weight.T + bias`` of a weight that each pass restores."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, shape: torch.Size) -> Any:  # type: ignore[override]
        ctx.save_for_backward(weight)
        ctx.shape = shape
        return functional.linear(input, _restore(weight, shape), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient @ _restore(weight, ctx.shape), None, None, None


def quantize_linear_layers(module: Any, precision: torch.dtype, parts: int = 1) -> None:
    """Replace the linear layers inside the decoder layers of a module on the meta device, for as many ranks to divide
    as there are ``parts``.

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
                setattr(owner, name, QuantizedLinear(part, precision, parts))


def quantized_layers(module: Any) -> dict[str, QuantizedLinear]:
    """Those of a module by the names of their weights."""
    parts = module.named_modules()
    return {f"{name}.weight": part for name, part in parts if isinstance(part, QuantizedLinear)}
