# SPDX-License-Identifier: Apache-2.0
"""What can be told of a run before it starts: the model's size, from the headers of its files, devices and engines."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from dlrover.python.rl.recipe.base.config import EngineConfig

_HEADER = struct.Struct("<Q")
_TRAINED_BYTES = 16
"""Per parameter: float32 weights, their gradients and Adam's two moments."""


def count_parameters(folder: Path) -> int | None:
    """The elements of all tensors in a folder's safetensors files; None if it has none that can be read."""
    try:
        return sum(map(_elements, folder.glob("*.safetensors"))) or None
    except (OSError, ValueError, struct.error):
        return None


def _elements(file: Path) -> int:
    """See https://github.com/huggingface/safetensors, Format: the length of the header, and the header as JSON."""
    with file.open("rb") as source:
        (length,) = _HEADER.unpack(source.read(_HEADER.size))
        header: dict[str, Any] = json.loads(source.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def describe_engines(model: str, engine: EngineConfig) -> list[str]:
    parameters = count_parameters(Path(model).expanduser())
    size = ""
    if parameters is not None:
        weights = parameters * (2 if engine.precision == "bf16" else 4)
        trained = parameters * _TRAINED_BYTES + (weights if engine.precision == "bf16" else 0)
        size = (
            f", {_short(parameters)} parameters; {_short(weights)}B of weights to generate,"
            f" {_short(trained)}B to train, activations not counted"
        )
    return [
        f"model: {model}{size}",
        f"engines: train {engine.train}, rollout {engine.rollout}, on {engine.device} in {engine.precision}",
    ]


def _short(number: float) -> str:
    """Three digits and a decimal prefix: ``1.24 G``."""
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g} {prefix}"
    return f"{number:g} "
