"""Engines by the name that a job file gives them; a user's own beside those that come along.

An engine's module is imported when the engine is asked for, and only then: it is the only place that imports its
backend.
"""

import importlib
from typing import Any

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.nearest import hint

_HERE = "dlrover.python.rl.engine"

TRAIN = {
    "fsdp2": f"{_HERE}.fsdp2.engine:Fsdp2TrainEngine",
    "deepspeed": f"{_HERE}.deepspeed.engine:DeepSpeedTrainEngine",
    "megatron": f"{_HERE}.megatron.engine:MegatronTrainEngine",
}
"""Where each train engine is: ``package.module:Class``, by name."""

ROLLOUT = {
    "torch": f"{_HERE}.torch.rollout:TorchRolloutEngine",
    "vllm": f"{_HERE}.vllm.engine:VllmRolloutEngine",
    "sglang": f"{_HERE}.sglang.engine:SglangRolloutEngine",
}
"""Where each rollout engine is."""


def register(kind: dict[str, str], name: str, where: str) -> None:
    """Add an engine of your own to :data:`TRAIN` or :data:`ROLLOUT`.

    Args:
        kind: the table.
        name: what job files call it.
        where: ``package.module:Class``; must be importable in the process that runs it.

    Raises:
        EngineError: the name is taken by another one.
    """
    if kind.get(name, where) != where:
        raise EngineError(f"'{name}' is {kind[name]} already")
    kind[name] = where


def engine_class(kind: dict[str, str], name: str) -> Any:
    """The class of the engine ``name``.

    Raises:
        EngineError: there is none of this name; gives the nearest.
        MissingExtra: its backend is not installed; names the extra.
    """
    if name not in kind:
        raise EngineError(f"no engine is called '{name}'{hint(name, kind)}; there are {', '.join(kind)}")
    module, _, attribute = kind[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
