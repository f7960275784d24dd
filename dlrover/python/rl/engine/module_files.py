"""Where a user's module gets its weights from, and how it is written."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.module import empty_weights
from dlrover.python.rl.engine.torch.blueprint import model_folder
from dlrover.python.rl.engine.torch.loading import write_atomically
from dlrover.python.rl.engine.torch.sources import Ranges, SafetensorsSource, Source, TensorSource


class DrawnSource:
    """Tensors that a function of name and shape makes.

    Args:
        shapes: name to shape.
        make: the function.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], make: Callable[[str, tuple[int, ...]], Any]) -> None:
        self._shapes, self._make = dict(shapes), make

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name to shape of every tensor there is."""
        return self._shapes

    def read(self, name: str, ranges: Ranges) -> Any:
        """The part ``ranges`` of the tensor ``name``.

        Raises:
            EngineError: the function made one of another shape.
        """
        tensor, shape = self._make(name, self._shapes[name]), self._shapes[name]
        if tuple(tensor.shape) != shape:
            raise EngineError(f"materialization_source() made '{name}' as {tuple(tensor.shape)}, not {shape}")
        return tensor[ranges]


def source_of(module: Any) -> Source:
    """Where a :class:`~dlrover.python.rl.engine.module.TrainModule` says that its weights are.

    Raises:
        EngineError: there is nothing.
    """
    origin = module.materialization_source()
    if isinstance(origin, Mapping):
        return TensorSource(origin)
    if callable(origin):
        shapes = {module.source_name(name): tuple(tensor.shape) for name, tensor in saved_tensors(module).items()}
        return DrawnSource(shapes, origin)
    return SafetensorsSource(model_folder(origin))


def saved_tensors(module: Any) -> dict[str, Any]:
    """Parameters and saved buffers of a module, by their first names."""
    seen: set[int] = set()
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def write_module(path: Path, module: Any, tensors: Mapping[str, Any]) -> None:
    """Write what a module exports to the folder ``path``, whole or not at all.

    A Hugging Face model is written in its format, as the library's own class, with the tokenizer of its source; any
    other as ``model.safetensors``.
    """
    if not isinstance(module, PreTrainedModel):
        write_atomically(path, _Tensors(), None, tensors)
        return
    hf_logging.disable_progress_bar()
    kind = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers."))
    with empty_weights():
        shell = kind(module.config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder(module.config.name_or_path))
    except (OSError, ValueError, EngineError):
        tokenizer = None  # A model made from other weights, or of other inputs than text, has none.
    write_atomically(path, shell, tokenizer, tensors)


class _Tensors:
    """Writes tensors as a Hugging Face model would."""

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Any]) -> None:
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in state_dict.items()}, folder / "model.safetensors")
