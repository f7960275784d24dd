# SPDX-License-Identifier: Apache-2.0
"""The parts of decoder layers (attention, MLP, norms) in kernels that ``torch.compile`` makes: one compilation of each
part for all layers and any number of tokens, and another one without gradients.

The layers themselves stay as they are, since FSDP2 and gradient checkpointing change how they are called, and so does
attention over packed documents: how it divides a row differs from batch to batch.
"""

import functools
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
    """Compile their parts, each at its first call. Raises EngineError if the model does not name its layers."""
    layers = layers_of(module)
    if not layers:
        raise EngineError(f"{type(module).__name__} does not name its layers: they cannot be compiled")
    _keep_attention()
    for part in (part for layer in layers for part in layer.children()):
        part.forward = torch.compile(part.forward, dynamic=True)


@functools.cache
def _keep_attention() -> None:
    """Code that is compiled calls packed attention as it is, in this process."""
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
