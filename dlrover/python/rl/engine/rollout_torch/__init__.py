# SPDX-License-Identifier: Apache-2.0
"""A rollout engine in plain PyTorch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.model_shape import by_library, find_state_fault


@dataclass(frozen=True)
class TorchOptions:
    forward: Literal["auto", "fused", "huggingface"] = "auto"
    """``fused``: this engine's forward pass, for Llama-like models; ``huggingface``: the model's; ``auto``: ``fused``
    if it supports the model."""

    enforce_eager: bool = False
    """On CUDA, launch the operations of a ``fused`` step one by one instead of a CUDA graph."""

    prefill_tokens: Annotated[int, Gt(0)] = 8192
    """Maximum tokens, padding included, of one forward pass over prompts; a longer prompt is read alone."""


def rounded_capacity(length: int) -> int:
    """Round a sequence's ``length`` up to a cache row's, so that slightly longer ones do not need another cache."""
    step = 64 if length <= 256 else 256
    return -(-length // step) * step


INFO = EngineInfo(
    TorchOptions, divides=(), masks_unknown_ids=True, adds_adapters=True, deterministic_on=("cpu",),
    find_model_fault=by_library(find_state_fault),
)  # fmt: skip
