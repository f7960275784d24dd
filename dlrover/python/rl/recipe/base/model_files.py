# SPDX-License-Identifier: Apache-2.0
"""Checks of a model's files before a run starts, and the model's size, vocabulary and room for tokens."""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from dlrover.python.rl.common.errors import ConfigError, EngineError
from dlrover.python.rl.common.hub import current_lookup, how_to_cache, hub_fault, is_cached, is_path
from dlrover.python.rl.common.names import nearest, variable_hint
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_info
from dlrover.python.rl.engine.model.loading import fingerprint_files, load_tokenizer
from dlrover.python.rl.engine.model.model_shape import count_positions, find_config_file, read_config, shape_of
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.engine.training.eight_bit import BLOCK
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.trainer.workload import Setting

_ALMOST = 0.8  # similarity from which a name is assumed to mean a folder rather than a model of the hub

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

_INDEX = "model.safetensors.index.json"
_OLD_WEIGHTS, _OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"  # read without a safetensors file

_HEADER = struct.Struct("<Q")
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error)
_FLOAT32 = 4

GB = 1e9


def count_parameters(folder: Path) -> int | None:
    """The elements of all tensors in a folder's safetensors files; None if they cannot be read."""
    index = folder / _INDEX
    try:
        # a folder may have the same weights twice, in files that no index names
        files = _files_of(index) if index.is_file() else ["model.safetensors"]
        tensors = (item for file in files for item in _read_header(folder / file)[0].items())
        shapes = {name: tensor["shape"] for name, tensor in tensors}
    except _UNREADABLE:
        return None
    return sum(map(math.prod, shapes.values())) if shapes else None


def _files_of(index: Path) -> list[str]:
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file by name, and its size by its header if it is whole."""
    with file.open("rb") as source:
        (length,) = _HEADER.unpack(source.read(_HEADER.size))
        header: dict[str, Any] = json.loads(source.read(min(length, file.stat().st_size)))
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    return tensors, _HEADER.size + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)


def _find_weight_fault(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / (_INDEX if files or (folder / _INDEX).is_file() else _OLD_INDEX)
    if index.is_file():
        try:
            files = _files_of(index)
        except _UNREADABLE as error:
            return f"{index} cannot be read: {error}"
        if absent := [name for name in files if not (folder / name).is_file()]:
            return f"{folder} lacks {', '.join(absent)}, which {index.name} names"
    elif not files and not (folder / _OLD_WEIGHTS).is_file():
        return f"{folder} holds no weights: no *.safetensors and no {_OLD_WEIGHTS}"
    for file in (folder / name for name in files if name.endswith(".safetensors")):
        try:
            size, whole = file.stat().st_size, _read_header(file)[1]
        except _UNREADABLE as error:
            return f"{file} is not a whole safetensors file: its header cannot be read: {error}"
        if size != whole:
            return f"{file} is not whole: it has {size:,} bytes, but its header describes {whole:,}"
    return ""


def moment_bytes(optimizer: OptimizerConfig, lora: LoraSettings | None = None) -> float:
    """Bytes of the optimizer's state per trained parameter; in 8 bits assuming that all parameters are in matrices."""
    if optimizer.name == "adamw_8bit":
        short_rows = 0.0 if lora is None else 1 / (2 * lora.rank)  # rows of half of the adapters are that short
        return 2 + 2 * _FLOAT32 * (1 / BLOCK + short_rows)
    return _FLOAT32 * (2 if optimizer.name == "adamw" else 1 if optimizer.momentum else 0)


def device_bytes(engine: EngineConfig, device: str = "cuda:0") -> float | None:
    if engine.device_memory_gb is not None:
        return engine.device_memory_gb * GB
    return float(torch.cuda.get_device_properties(device).total_memory) if torch.cuda.is_available() else None


def trained_bytes(
    model: str,
    optimizer: OptimizerConfig,
    lora: LoraSettings | None = None,
    fallback: str | None = None,
    head: Head = "causal",
) -> int | None:
    """Bytes of the float32 weights and moments of a trained model, with ``lora`` of the adapters and a new ``head``
    alone. None if neither the model's files nor its configuration are on this machine; ``fallback``: see
    :func:`~dlrover.python.rl.engine.model.model_shape.shape_of`."""
    shape = shape_of(model, fallback) if lora is not None or head == "token" else None
    shape = shape.with_score_head() if shape is not None and head == "token" else shape
    if lora is not None:
        parameters = None if shape is None else shape.trained_parameters(lora)
    else:
        parameters = parameters_of(model, fallback) if shape is None else shape.parameters
    return None if parameters is None else int(parameters * (_FLOAT32 + moment_bytes(optimizer, lora)))


def parameters_of(model: str, fallback: str | None = None) -> int | None:
    """Count a model's parameters by the headers of its files, or else by its configuration."""
    counted = count_parameters(Path(model).expanduser())
    shape = shape_of(model, fallback) if counted is None else None
    return counted if shape is None else shape.parameters


def setting_of_weights(model: str) -> Setting:
    """The initial weights, identified if their safetensors files are on this machine or in the hub's cache."""
    file, fingerprint = find_config_file(model), ""
    with suppress(EngineError, OSError, ValueError, LookupError):  # files that are not whole
        fingerprint = fingerprint_files(None if file is None else file.parent)
    return Setting(model, fingerprint or None)


def validate_model(model: str, where: str = "config.model") -> list[ConfigError]:
    """Check that a path exists, with whole files of weights. A name that resembles a sibling folder is no hub name,
    unless the hub's cache has it; a hub name is looked up only if the check includes look-ups."""
    if not model:
        return []  # reported already: it is required
    folder = Path(model).expanduser()
    if not folder.is_dir():
        siblings = folder.parent.glob("*/config.json") if folder.parent.is_dir() else ()
        close = get_close_matches(folder.name, [path.parent.name for path in siblings], 1, _ALMOST)
        is_misspelled = close and ("/" not in model or not is_cached(model))
        if is_misspelled or is_path(model) or variable_hint(model):
            advice = f"; did you mean '{folder.parent / close[0]}'?" if close else how_to_cache(model)
            return [ConfigError(where, f"no such folder: {model}{variable_hint(model) or advice}")]
        fault = hub_fault("model", model) if current_lookup() == "all" else ""
        return [ConfigError(where, f"no folder '{model}', and {fault}")] if fault else []
    if not (folder / "config.json").is_file():
        return [ConfigError(where, f"{model} holds no model: it has no config.json")]
    if not read_config(model):
        return [ConfigError(where, f"{folder / 'config.json'} is empty or no JSON object: write the model again")]
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return [ConfigError(where, f"{model} holds no tokenizer: it has none of {', '.join(_TOKENIZER_FILES)}")]
    fault = _find_weight_fault(folder)
    return [ConfigError(where, fault)] if fault else []


def validate_vocabulary(model: str, policy: str, where: str) -> list[ConfigError]:
    """Check that the policy's token ids mean the same tokens to a model, as far as their files say."""
    tokens, wanted = (_vocabulary(Path(name).expanduser()) for name in (model, policy))
    if tokens is None or wanted is None:
        return []
    by_id = {number: token for token, number in wanted.items()}
    for token, number in tokens.items():
        if wanted.get(token, number) != number or by_id.get(number, token) != token:
            meaning = f"{token!r} has id {wanted[token]}" if token in wanted else f"this is {by_id[number]!r}"
            message = f"{token!r} has id {number} in {model}, but in {policy} {meaning}"
            return [ConfigError(where, f"its vocabulary differs from the policy's: {message}")]
    return []


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Map tokens to ids (https://github.com/huggingface/tokenizers); None if the files do not say."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        listed = content["model"]["vocab"]
        tokens = listed if isinstance(listed, dict) else {each[0]: number for number, each in enumerate(listed)}
        added = {each["content"]: each["id"] for each in content.get("added_tokens") or ()}
        settings = folder / "tokenizer_config.json"
        config = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        more = {each["content"]: int(number) for number, each in (config.get("added_tokens_decoder") or {}).items()}
        return {**tokens, **added, **more}
    except _UNREADABLE:
        return None


T = TypeVar("T")

LARGEST = 1000  # the number of rows, the largest of a file, that a check encodes at most; a run encodes all
_OPENING, _TEMPLATE = 2, 256
"""Tokens that a tokenizer may add to a text, and a chat template to the bytes of a conversation's JSON."""


def count_room(cfg: Any, generates: bool = False) -> int | None:
    """Maximum tokens of a sequence by the model and, if it ``generates``, the rollout engine's option."""
    option = engine_info(ROLLOUT_ENGINES, cfg.engine.rollout).limit_option if generates else ""
    limits = [count_positions(read_config(cfg.model, cfg.model_config)), cfg.engine.rollout_options.get(option)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def find_large(rows: Iterable[T], content: Callable[[T], Any], limit: int) -> list[T]:
    """Find the rows that may have more than ``limit`` tokens, the largest first: a token has at least a byte."""
    large = []
    for row in rows:
        written = content(row)
        is_text = isinstance(written, str)
        text = written if is_text else json.dumps(written, ensure_ascii=False, default=str)
        nbytes = len(text.encode(errors="replace")) + (_OPENING if is_text else _TEMPLATE)
        large += [(nbytes, row)] if nbytes > limit else []
    return [row for _, row in sorted(large, key=lambda item: -item[0])[:LARGEST]]


@cache
def find_tokenizer(model: str) -> Any:
    """The tokenizer of a model on this machine; None if it is elsewhere or cannot be loaded."""
    file = find_config_file(model)
    try:
        return None if file is None else load_tokenizer(file.parent)
    except EngineError:  # the engine reports it
        return None


def validate_model_config(config_file: str | None) -> list[ConfigError]:
    """Check that it is a ``config.json``, a folder with one, or a model in this machine's cache of the hub."""
    if config_file is None or shape_of(config_file) is not None:
        return []
    path = Path(config_file).expanduser()
    message = f"{config_file} is no config.json of a language model, nor a folder with one"
    if not path.exists() and not is_cached(config_file):
        folder = "" if path.is_absolute() else f" in {Path.cwd()}"
        may_be_of_hub = config_file.count("/") == 1 and config_file[0] not in "./~" and path.suffix != ".json"
        cached = ", nor a model in this machine's cache of the hub" if may_be_of_hub else ""
        missing, close = next(each for each in (*reversed(path.parents), path) if not each.exists()), None
        with suppress(OSError):  # below a file, or a folder that may not be listed
            close = nearest(missing.name, os.listdir(missing.parent))
        meant = f"; did you mean '{missing.parent / close}'?" if close else ""
        message = f"no such file or folder: {config_file}{folder}{cached}{meant}"
    return [ConfigError("config.model_config", message)]
