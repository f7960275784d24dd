# SPDX-License-Identifier: Apache-2.0
"""Where a user's module gets its weights from, and how it is written."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.model.loading import (
    SafetensorsSource,
    TensorSource,
    WeightReader,
    find_model_folder,
    list_saved_tensors,
    write_atomically,
)
from dlrover.python.rl.engine.model.train_module import empty_weights


def find_weight_source(module: Any) -> WeightReader:
    """The source that a :class:`TrainModule` names."""
    origin = module.materialization_source()
    if isinstance(origin, Mapping):
        return TensorSource(origin)
    if callable(origin):
        shapes = {module.source_name(name): tuple(tensor.shape) for name, tensor in list_saved_tensors(module).items()}
        return TensorSource({name: partial(_make, origin, name, shape) for name, shape in shapes.items()}, shapes)
    return SafetensorsSource(find_model_folder(origin))


def _make(make: Callable[[str, tuple[int, ...]], Any], name: str, shape: tuple[int, ...]) -> Any:
    tensor = make(name, shape)
    if tuple(tensor.shape) != shape:
        raise EngineError(f"materialization_source() made '{name}' as {tuple(tensor.shape)}, not {shape}")
    return tensor


def write_module(path: Path, module: Any, tensors: Mapping[str, Any]) -> None:
    """Write what a module exports to the folder ``path``, atomically.

    A Hugging Face model is written in its format, as the library's own class, with the tokenizer of its source; any
    other as ``model.safetensors``.
    """
    if not isinstance(module, PreTrainedModel):
        write_atomically(path, _Tensors(), None, tensors)
        return
    hf_logging.disable_progress_bar()
    kind = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers."))
    with empty_weights():
        model = kind(module.config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(find_model_folder(module.config.name_or_path))
    except (OSError, ValueError, EngineError):
        tokenizer = None  # A new model, or one without text inputs, has none.
    write_atomically(path, model, tokenizer, tensors)


class _Tensors:
    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Any]) -> None:
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in state_dict.items()}, folder / "model.safetensors")
