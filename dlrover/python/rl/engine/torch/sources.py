"""Where a module's weights come from: read a tensor, or a part of one, at a time."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import safe_open

from dlrover.python.rl.common.errors import EngineError

Ranges: TypeAlias = tuple[slice, ...]
"""One slice for each dimension."""


class Source(Protocol):
    """Tensors by name."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name to shape of every tensor there is."""
        ...

    def read(self, name: str, ranges: Ranges) -> Any:
        """The part ``ranges`` of the tensor ``name``, on the host, in the precision it is kept in."""
        ...


class TensorSource:
    """Tensors in memory; a tensor may also be a function of no arguments that makes it."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every tensor there is."""
        return {name: tuple(self._whole(name).shape) for name in self._tensors}

    def read(self, name: str, ranges: Ranges) -> Any:
        """The part ``ranges`` of the tensor ``name``."""
        return self._whole(name)[ranges]

    def _whole(self, name: str) -> Any:
        tensor = self._tensors[name]
        return tensor if isinstance(tensor, torch.Tensor) else tensor()


class SafetensorsSource:
    """The ``*.safetensors`` files of a folder; of a part that is asked for, no other byte is read.

    Raises:
        EngineError: the folder's index names a file that is not there.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise EngineError(f"'{folder}' lacks {', '.join(absent)}")
        self._files = [safe_open(folder / name, framework="pt") for name in names]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - no mapping

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every tensor there is."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def read(self, name: str, ranges: Ranges) -> Any:
        """The part ``ranges`` of the tensor ``name``."""
        file = self._file_of[name]
        return file.get_slice(name)[ranges] if ranges else file.get_tensor(name)


def place_names(
    wanted: Mapping[str, tuple[str, ...]],
    there: Mapping[str, Any],
    prefix: str = "",
    rename: Callable[[str], str] | None = None,
) -> dict[str, str]:
    """Find each of a module's tensors among the names of a source.

    Args:
        wanted: a tensor's first name in the module, and all its names: those that are tied to it may stand for it.
        there: the names that the source has.
        prefix: what the module puts before the names of its base model, which sources of the bare model lack.
        rename: gives the source's name of a module's.

    Returns:
        First name in the module to the name in the source; what is not found is left out.
    """
    found = {}
    for first, names in wanted.items():
        asked = [rename(name) for name in names] if rename else list(names)
        asked += [name.removeprefix(f"{prefix}.") for name in asked if prefix and name.startswith(f"{prefix}.")]
        asked += [f"{prefix}.{name}" for name in asked if prefix]
        match = next((name for name in asked if name in there), None)
        if match is not None:
            found[first] = match
    return found


def drawn(name: str, shape: tuple[int, ...], spread: float) -> Any:
    """Normal numbers of standard deviation ``spread``, the same in every process: the name is their seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * spread
