"""Engines by the name that a job file gives them; a user's own beside those that come along.

An engine's module is imported when the engine is asked for, and only then: it is the only place that imports its
backend.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrover.python.rl.common.errors import EngineError, MissingExtra, Problem
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.config.typed import parse

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


@dataclass(frozen=True)
class NoOptions:
    """Of an engine that has none of its own."""


OPTIONS = {
    "fsdp2": f"{_HERE}.registry:NoOptions",
    "deepspeed": f"{_HERE}.deepspeed.options:DeepSpeedOptions",
    "megatron": f"{_HERE}.megatron.options:MegatronOptions",
    "torch": f"{_HERE}.torch.options:TorchOptions",
    "vllm": f"{_HERE}.vllm.settings:VllmOptions",
    "sglang": f"{_HERE}.sglang.settings:SglangOptions",
}
"""Where the dataclass is that an engine's ``backend`` options are read as. A registered engine reads its own."""

_PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron-core", "vllm": "vllm", "sglang": "sglang"}
"""What only this engine imports, as a module of the engine's name. So is the extra called that brings it."""


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


def engine_place(kind: dict[str, str], name: str) -> str:
    """Where the engine ``name`` is. Its module is not imported, but its package, which knows what it cannot do without.

    Raises:
        EngineError: there is none of this name; gives the nearest.
        MissingExtra: its backend is not installed; names the extra.
    """
    if name not in kind:
        raise EngineError(f"no engine is called '{name}'{hint(name, kind)}; there are {', '.join(kind)}")
    if kind[name].startswith(_HERE):
        importlib.import_module(kind[name].partition(":")[0].rpartition(".")[0])
    return kind[name]


def engine_class(kind: dict[str, str], name: str) -> Any:
    """The class of the engine ``name``.

    Raises:
        EngineError: there is none of this name; gives the nearest.
        MissingExtra: its backend is not installed; names the extra.
    """
    return class_at(engine_place(kind, name))


def engine_problems(kind: dict[str, str], name: str, options: Mapping[str, Any], where: str) -> list[Problem]:
    """What is wrong with the choice of an engine, before it is imported: its name, its extra, its options.

    Args:
        kind: :data:`TRAIN` or :data:`ROLLOUT`.
        name: as a job file gives it.
        options: what only this engine can be told; a ``url`` stands for a server that has the package itself.
        where: what a job file calls the name; the options are next to it, with ``_options`` behind.
    """
    if name not in kind:
        return [Problem(where, f"no engine is called '{name}'{hint(name, kind)}")]
    if name in _PACKAGES and importlib.util.find_spec(name) is None and "url" not in options:
        return [Problem(where, str(MissingExtra(_PACKAGES[name], name)))]
    if name not in OPTIONS:
        return []
    return parse(class_at(OPTIONS[name]), dict(options), f"{where}_options")[1]


def class_at(where: str) -> Any:
    """The class at ``package.module:Class``.

    Raises:
        MissingExtra: what it is made for is not installed; names the extra.
    """
    module, _, attribute = where.partition(":")
    return getattr(importlib.import_module(module), attribute)
