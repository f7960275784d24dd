# SPDX-License-Identifier: Apache-2.0
"""A rollout engine in plain PyTorch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.api.registry import EngineInfo, find_rollout_errors, raise_engine_errors


@dataclass(frozen=True)
class TorchOptions:
    """``backend`` options of the rollout engine ``torch``."""

    forward: Literal["auto", "fused", "huggingface"] = "auto"
    """``fused``: this engine's forward pass, for Llama-like models; ``huggingface``: the model's; ``auto``: ``fused``
    where the model supports it."""

    prefill_tokens: Annotated[int, Gt(0)] = 8192
    """Most tokens, padding included, of one forward pass over prompts; a longer prompt is read alone."""


INFO = EngineInfo(TorchOptions, divides=())


def parse_options(settings: RolloutSettings) -> TorchOptions:
    options, errors = parse(TorchOptions, dict(settings.backend), "backend")
    if options is None:
        raise EngineError("; ".join(map(str, errors)))
    raise_engine_errors(find_rollout_errors("torch", INFO, settings.tensor_parallel_size))
    return options
