"""Low-rank adapters through peft: put in, and merged on the way out.

``W' = W + B A alpha / rank`` (Hu et al., arXiv:2106.09685, equation 3).
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.engine.base import LoraSettings
from dlrover.python.rl.engine.fsdp2.shards import ParameterShard, Shards
from dlrover.python.rl.engine.module import empty_weights
from dlrover.python.rl.engine.torch.sources import drawn

_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."


def add_adapters(module: Any, settings: LoraSettings) -> None:
    """Put adapters beside the target layers of a module on the meta device; only they are trained then.

    Raises:
        MissingExtra: peft is not installed.
        EngineError: the module has no layer of these names.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra("peft", "lora") from error
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.targets), lora_dropout=0.0
    )
    try:
        with empty_weights():
            inject_adapter_in_model(config, module)
    except ValueError as error:
        raise EngineError(f"no adapters can be added: {error}") from error


def model_name(name: str) -> str:
    """The name that a parameter of a module with adapters has in the model without them."""
    return name.replace(_BASE, ".")


def fresh_adapter(name: str, shape: tuple[int, ...]) -> Any:
    """What a new adapter starts from: ``A`` is drawn, ``B`` is zero, so the model is what it was. None for others."""
    if _UP in name:
        return torch.zeros(shape)
    return drawn(name, shape, 1 / math.sqrt(3 * shape[-1])) if _DOWN in name else None


def is_adapter(shard: ParameterShard) -> bool:
    """Whether it is part of an adapter, not of the model."""
    return _DOWN in shard.name or _UP in shard.name


def merge(shards: Shards, shard: ParameterShard, whole: Callable[[ParameterShard], Any], settings: LoraSettings) -> Any:
    """The whole tensor of a parameter with its adapter added; as it is where it has none. A collective.

    Args:
        shards: all of the module.
        shard: the parameter's.
        whole: gives the whole tensor of a shard.
        settings: of the adapters.
    """
    by_name = {other.name: other for other in shards}
    pair = [by_name.get(shard.name.replace(_BASE, kind)) for kind in (_DOWN, _UP)]
    base = whole(shard)
    if _BASE not in shard.name or None in pair:
        return base
    down, up = (whole(part) for part in pair if part is not None)
    return base.float() + (up @ down) * (settings.alpha / settings.rank)
