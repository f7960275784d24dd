# SPDX-License-Identifier: Apache-2.0
"""A model's folder before a run starts: whether it can be loaded, and its size from the headers of its files."""

import json
import math
import struct
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.hub import NOT_LOOKED_UP, Lookup, current_lookup, hub_fault, is_cached
from dlrover.python.rl.common.log import short_number
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, TRAIN_ENGINES, absent_package
from dlrover.python.rl.engine.model.model_shape import shape_of
from dlrover.python.rl.engine.training.eight_bit import BLOCK
from dlrover.python.rl.recipe.base.config import EngineConfig

_ALMOST = 0.8
"""Similarity from which a name is taken to mean a folder rather than a model of the hub."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

_HEADER = struct.Struct("<Q")
_MATRIX, _FLOAT32 = 2, 4
_TRAINED_BYTES = 16
"""Per parameter: float32 weights, their gradients and Adam's two moments."""


def count_parameters(folder: Path) -> int | None:
    """The elements of all tensors in a folder's safetensors files; None if they cannot be read."""
    shapes = _shapes(folder)
    return None if shapes is None else sum(map(math.prod, shapes.values()))


def _shapes(folder: Path) -> dict[str, list[int]] | None:
    index = folder / "model.safetensors.index.json"
    try:
        # Folders may have the same weights again, in files that no index names.
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        return {name: shape for file in files for name, shape in _shapes_in(folder / file)} or None
    except (OSError, ValueError, KeyError, struct.error):
        return None


def _shapes_in(file: Path) -> Iterator[tuple[str, list[int]]]:
    """See https://github.com/huggingface/safetensors, Format: the length of the header, and the header as JSON."""
    with file.open("rb") as source:
        (length,) = _HEADER.unpack(source.read(_HEADER.size))
        header: dict[str, Any] = json.loads(source.read(length))
    return ((name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def moment_bytes(optimizer: OptimizerConfig, lora: LoraSettings | None = None) -> float:
    """The optimizer's state for each trained parameter; in 8 bits for those of matrices, which are all but a few."""
    if optimizer.name == "adamw_8bit":
        short_rows = 0.0 if lora is None else 1 / (2 * lora.rank)  # half of the adapters have rows of their rank
        return 2 + 2 * _FLOAT32 * (1 / BLOCK + short_rows)
    return _FLOAT32 * (2 if optimizer.name == "adamw" else 1 if optimizer.momentum else 0)


def trained_bytes(
    model: str, optimizer: OptimizerConfig, lora: LoraSettings | None = None, fallback: str | None = None
) -> int | None:
    """The state of a model that is trained, in float32: weights and the optimizer's moments, of the adapters alone if
    there are some. None if neither the model's files are here nor its configuration; ``fallback``: see
    :func:`~dlrover.python.rl.engine.model.model_shape.shape_of`."""
    shapes = _shapes(Path(model).expanduser())
    if shapes is None:
        shape = shape_of(model, fallback)
        if shape is None:
            return None
        parameters = shape.parameters if lora is None else shape.adapter_parameters(lora)
    elif lora is not None:
        adapted = [shape for name, shape in shapes.items() if _layer_of(name) in lora.targets]
        parameters = sum(lora.rank * sum(shape) for shape in adapted if len(shape) == _MATRIX)
    else:
        parameters = sum(map(math.prod, shapes.values()))
    return int(parameters * (_FLOAT32 + moment_bytes(optimizer, lora)))


def _layer_of(tensor: str) -> str:
    """``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    return tensor.rpartition(".")[0].rpartition(".")[2]


def describe_engines(model: str, engine: EngineConfig, fallback: str | None = None) -> list[str]:
    """``fallback``: see :func:`~dlrover.python.rl.engine.model.model_shape.shape_of`."""
    shape = shape_of(model, fallback)
    parameters = count_parameters(Path(model).expanduser()) or (None if shape is None else shape.parameters)
    size = ""
    if parameters is not None:
        weights = parameters * (2 if engine.precision == "bf16" else 4)
        trained = parameters * _TRAINED_BYTES + (weights if engine.precision == "bf16" else 0)
        size = f", {short_number(parameters)} parameters; {short_number(weights)}B of weights to generate"
        if not engine.train_options.get("optimizer_on_host"):
            size += f", {short_number(trained)}B to train, activations not counted"
    elif current_lookup() is Lookup.NONE and not Path(model).expanduser().is_dir():
        size = f", {NOT_LOOKED_UP}"
    absent = {
        absent_package(TRAIN_ENGINES, engine.train, engine.train_options),
        absent_package(ROLLOUT_ENGINES, engine.rollout, engine.rollout_options),
    }
    return [
        f"model: {model}{size}",
        f"engines: train {engine.train}, rollout {engine.rollout}, on {engine.device} in {engine.precision}",
        *(f"  {package} is not on this machine: those of the job need it" for package in sorted(absent) if package),
    ]


def validate_model(model: str, where: str = "config.model") -> list[ConfigError]:
    """A model given as a path must exist, and a name like that of a folder beside it is none of the hub's, unless its
    cache has it; a hub name is looked up if the check is asked to, else when it is loaded."""
    if not model:
        return []  # reported already: it is required
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    folder = Path(model).expanduser()
    if not folder.is_dir():
        siblings = folder.parent.glob("*/config.json") if folder.parent.is_dir() else ()
        close = get_close_matches(folder.name, [path.parent.name for path in siblings], 1, _ALMOST)
        is_meant_so = close and ("/" not in model or not is_cached(model))
        if looks_like_path or is_meant_so:
            advice = f"; did you mean '{folder.parent / close[0]}'?" if close else ""
            return [ConfigError(where, f"no such folder: {model}{advice}")]
        fault = hub_fault("model", model) if current_lookup() is Lookup.ALL else ""
        return [ConfigError(where, f"no folder '{model}', and {fault}")] if fault else []
    if not (folder / "config.json").is_file():
        return [ConfigError(where, f"{model} holds no model: it has no config.json")]
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return [ConfigError(where, f"{model} holds no tokenizer: it has none of {', '.join(_TOKENIZER_FILES)}")]
    return []
