"""What only the torch rollout engine can be told."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.engine.abilities import refuse, rollout_faults
from dlrover.python.rl.engine.base import RolloutSettings


@dataclass(frozen=True)
class TorchOptions:
    """What ``settings.backend`` may hold."""

    forward: Literal["auto", "fused", "huggingface"] = "auto"
    """``fused``: this engine's own forward pass, for models built like Llama; ``huggingface``: the model's own;
    ``auto``: the first where it fits."""

    prefill_tokens: Annotated[int, Gt(0)] = 8192
    """Most tokens, padding included, of one forward pass over prompts; a longer one comes alone."""


def torch_options(settings: RolloutSettings) -> TorchOptions:
    """Read ``settings`` for this engine.

    Raises:
        EngineError: an option is unknown (gives the nearest) or wrong, or more than one device is asked for.
    """
    options, problems = parse(TorchOptions, dict(settings.backend), "backend")
    if options is None:
        raise EngineError("; ".join(map(str, problems)))
    refuse(rollout_faults("torch", settings.tensor_parallel_size))
    return options
