# SPDX-License-Identifier: Apache-2.0
"""The parts of decoder layers (attention, MLP, norms) in kernels that ``torch.compile`` makes: one compilation of each
part for all layers and any number of tokens, and another one without gradients.

The layers themselves stay as they are, since FSDP2 and gradient checkpointing change how they are called, and so does
attention over packed documents: how it divides a row differs from batch to batch.
"""

import functools
from typing import Any

import torch
from transformers import AttentionInterface

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.loading import layers_of


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
