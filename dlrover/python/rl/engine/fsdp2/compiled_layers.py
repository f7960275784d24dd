# SPDX-License-Identifier: Apache-2.0
"""Decoder layers in kernels that ``torch.compile`` makes: one compilation for all layers, and for any number of tokens.

Attention over packed documents is called as it is: how it divides a row differs from batch to batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.model import attention


def layers_of(module: Any) -> list[Any]:
    """Those that a Hugging Face model names as what is not to be split."""
    units: Sequence[Any] = (
        getattr(module, "non_split_modules", None) or getattr(module, "_no_split_modules", None) or ()
    )
    names = {unit if isinstance(unit, str) else unit.__name__ for unit in units}
    return [part for part in module.modules() if type(part).__name__ in names and part is not module]


def compile_layers(module: Any) -> None:
    """Compile them at their first call. Raises EngineError if the model does not name them."""
    layers = layers_of(module)
    if not layers:
        raise EngineError(f"{type(module).__name__} does not name its layers: they cannot be compiled")
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)  # inside of hooks, which shard and recompute
