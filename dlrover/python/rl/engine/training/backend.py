# SPDX-License-Identifier: Apache-2.0
"""The base of train backends, and their checkpoints through ``torch.distributed.checkpoint``.

Each rank writes its part. Ranks of another layout or another engine can read their own parts of it.
"""

import glob
import shutil
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, TokenLoss, TrainSettings
from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.api.weights import WeightSnapshot, add_adapter
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.loading import DTYPES, prepare_training, sync_to_disk
from dlrover.python.rl.engine.model.outputs import OutputReader
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks, pack_random_state, unpack_random_state
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.training.adapters import (
    add_adapters,
    find_pair,
    is_adapter,
    model_name,
    quantize_linear_layers,
    synced_name,
)
from dlrover.python.rl.engine.training.redivide import restore_state
from dlrover.python.rl.engine.training.stepping import MasterOptimizer


@dataclass(frozen=True, eq=False)
class TrainSetup:
    """The constant parts of a rank's engine."""

    spec: ModelSpec
    config: OptimizerConfig | None  # None: a frozen engine
    settings: TrainSettings
    options: Any  # of the backend: its ``EngineInfo.options``
    adapters: Mapping[str, Any] | None = None  # the entry ``lora`` of states, with adapters
    ranks: Ranks = Ranks()

    def empty_module(self, parts: int = 1, reentrant: bool = False) -> Any:
        """Build the module on the meta device, with adapters, and prepared for passes with gradients if it is trained.
        ``parts`` ranks will divide each quantized matrix; ``reentrant`` is the kind of recomputation of activations."""
        module, lora = self.spec.empty(), self.settings.lora
        if lora is not None:
            if lora.quantize_base is not None:
                quantize_linear_layers(module, DTYPES[self.settings.precision], parts)
            add_adapters(module, lora)
        prepare_training(module, self.config is not None, self.settings.gradient_checkpointing, reentrant)
        return module


class TrainBackend(ABC):
    """This rank's part of a model and, unless frozen, of its optimizer. All ranks call every method together.

    The methods here serve a Hugging Face module, and shards whose masters a :class:`MasterOptimizer` steps."""

    packs: bool  # packed documents do not see each other
    limits: tuple[int, int | None]  # vocabulary size, and maximum tokens of a row or None
    module: Any
    passes: Any  # the module, or the library's wrapper that runs it
    reader: OutputReader
    optimizer: MasterOptimizer | None = None
    shards: Any  # this rank's part of each parameter, in the order of the model
    buffers: Mapping[str, Any]  # the saved buffers by name, whole on every rank

    def __init__(self, setup: TrainSetup, parked: ParkedTensors) -> None:
        self.setup, self.parked = setup, parked

    # -- passes -------------------------------------------------------------------------------------------------------

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        """Yield each micro-batch with the values for ``gather_outputs``, without gradient."""
        with self._computing():
            for micro in micros:
                note_progress()
                yield micro, self.reader.read(self.passes, micro, temperature, entropy)

    def _computing(self) -> AbstractContextManager[None]:
        """Enclose passes through the module."""
        return nullcontext()

    @abstractmethod
    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        """Add the loss's gradients; returns sums for ``check_loss``, empty on all but one rank of a model replica."""

    @abstractmethod
    def reduce_gradients(self) -> list[Any]:
        """Sum the gradients over the ranks; returns this rank's part."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient: the same bits on every rank."""

    @abstractmethod
    def first_bad_gradient(self) -> str:
        """Return the name of the first parameter whose gradient is not finite, the same on every rank."""

    def update(self, version: int, norm: float) -> float:
        """Clip the gradient of norm ``norm`` and take the step after ``version``; returns the learning rate."""
        assert self.optimizer is not None
        return self.optimizer.step(version, norm)

    @abstractmethod
    def drop_gradients(self) -> None: ...

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self, dtype: Any = None, merged: bool = True) -> Iterator[tuple[str, Any]]:
        """See ``BaseTrainEngine``. Adapters are left out unless ``merged``. Without a ``dtype`` all weights of a
        trained model are float32."""
        lora, by_name = self.setup.settings.lora, {shard.name: shard for shard in self.shards}
        dtype = dtype or (None if self.setup.config is None else torch.float32)
        for name, shard in by_name.items():
            if lora is None:
                yield name, self._whole(shard, dtype)
            elif not is_adapter(name):
                weight, pair = self._whole(shard), find_pair(name, by_name) if merged else None
                if pair is not None:
                    down, up = (self._whole(by_name[part]) for part in pair)
                    weight = add_adapter(weight, down, up, lora.scale, weight.device, torch.float32)
                yield model_name(name), weight.to(dtype)
        yield from ((name, self.parked.locate(buffer)) for name, buffer in self.buffers.items())

    def named_adapters(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and whole tensor of each matrix of an adapter. A collective."""
        for shard in self.shards:
            if is_adapter(shard.name):
                yield synced_name(shard.name), self._whole(shard)

    @abstractmethod
    def _whole(self, shard: Any, dtype: Any = None) -> Any:
        """Return the whole tensor of a shard, by default in the precision of its master. A collective."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of :meth:`named_weights` by name."""
        shapes = {shard.name: shard.shape for shard in self.shards}
        return shapes | {name: tuple(buffer.shape) for name, buffer in self.buffers.items()}

    @abstractmethod
    def write_weights(self, weights: WeightSnapshot) -> None:
        """Adopt a verified snapshot."""

    # -- states -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def local_state(self) -> dict[str, Any]:
        """Return ``layout``, ``model`` and ``optimizer`` (None if frozen): the live tensors. With adapters, ``model``
        has only these: the rest does not change."""

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        """See :func:`restore_state`."""
        restore_state(self.local_state(), state)
        self.refresh()

    def refresh(self) -> None:
        """Copy the masters to the module's parameters."""
        for shard in self.shards:
            shard.refresh(self.parked.locate)

    @abstractmethod
    def write_checkpoint(self, path: Path, version: int) -> None:
        """Write everything to the folder ``path``, each rank its part, atomically."""

    @abstractmethod
    def read_checkpoint(self, path: Path) -> int:
        """Restore :meth:`write_checkpoint`; returns the version. Raises an ``EngineError`` if it does not fit."""

    def release(self) -> None:
        """Undo side effects; the backend is not used again, and its tensors are emptied next."""


_VERSION, _LAYOUT = "version", "layout"


def write_folder(path: Path, ranks: Ranks, write: Callable[[Path], None]) -> None:
    """Let every rank write its files to a new folder, which then replaces ``path``.

    Whenever a process is killed, :func:`present` finds the old folder or the new one, never a part. Leftovers of
    interrupted writes are removed. If a rank cannot write, all ranks raise an ``EngineError``, the old folder stays and
    the new one is removed."""
    new = path.with_name(f".{path.name}.new-{ranks.gather(uuid.uuid4().hex)[0]}")

    def fill() -> None:
        new.mkdir(parents=True, exist_ok=True)
        write(new)

    def replace() -> None:
        if ranks.rank:
            return
        if path.exists():
            path.rename(path.with_name(f".{path.name}.old-{time.time_ns():020}"))
        new.rename(path)
        sync_to_disk(path.parent)
        for leftover in (*_list_beside(path, "new"), *_list_beside(path, "old")):
            shutil.rmtree(leftover, ignore_errors=True)

    try:
        _run_on_all(path, ranks, fill)
    except EngineError:
        if ranks.rank == 0:
            shutil.rmtree(new, ignore_errors=True)
        raise
    _run_on_all(path, ranks, replace)


def _run_on_all(path: Path, ranks: Ranks, act: Callable[[], None]) -> None:
    fault = ""
    cause: BaseException | None = None
    try:
        act()
    except (OSError, RuntimeError, CheckpointException) as error:
        fault, cause = f"the checkpoint '{path}' cannot be written: {error}", error
    try:
        ranks.raise_any(fault)
    except EngineError as error:
        raise error from cause


def _list_beside(path: Path, kind: str) -> list[Path]:
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.{kind}-*"))


def present(path: Path) -> Path:
    """Return ``path``, or the last folder that an interrupted write had renamed before the new one was in place."""
    old = _list_beside(path, "old")
    return path if path.exists() or not old else old[-1]


def stored_name(name: str, kind: str = "") -> str:
    """Return a checkpoint's name of a parameter's float32 weights, or of its optimizer state ``kind``. ``name`` is
    Hugging Face's."""
    return f"optimizer/{name}/{kind}" if kind else f"model/{name}"


def write_checkpoint(path: Path, ranks: Ranks, layout: Layout, tensors: Mapping[str, Any], version: int) -> None:
    """Write ``tensors`` (DTensors if ranks divide them), version, layout and random state, atomically."""
    about = {_VERSION: torch.tensor(version), _LAYOUT: torch.tensor(layout.shape)}
    tree = {**tensors, **about, f"random-{ranks.rank}": pack_random_state()}

    def write(new: Path) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.save(tree, checkpoint_id=new, no_dist=ranks.world_size == 1)

    write_folder(path, ranks, write)


def read_checkpoint(
    path: Path, ranks: Ranks, layout: Layout, tensors: Mapping[str, Any], names: Collection[str] | None = None
) -> int:
    """Read a checkpoint into this rank's ``tensors``, in place; returns the version. The same layout restores the
    random state too. ``names`` lists all ranks' tensors, if there are more. Raises an ``EngineError`` if there is no
    checkpoint, or it is of another model or optimizer."""
    folder = present(path)
    if not (folder / ".metadata").is_file():
        raise EngineError(f"no checkpoint at '{path}'")
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    _check(path, tensors, names or tensors.keys(), stored)
    own = f"random-{ranks.rank}"
    tree: dict[str, Any] = {**tensors, _VERSION: torch.tensor(0), _LAYOUT: torch.zeros(5, dtype=torch.int64)}
    if own in stored:
        tree[own] = torch.zeros(stored[own].size, dtype=torch.uint8)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(tree, storage_reader=reader, no_dist=ranks.world_size == 1)
    except CheckpointException as error:
        raise EngineError(f"the checkpoint '{path}' cannot be read: {error}") from error
    if own in tree and tuple(tree[_LAYOUT].tolist()) == layout.shape:
        unpack_random_state(tree[own])
    return int(tree[_VERSION])


def _check(path: Path, tensors: Mapping[str, Any], names: Collection[str], stored: Mapping[str, Any]) -> None:
    faults = [f"lacks {name}" for name in names if name not in stored]
    faults += [
        f"has {name} of shape {tuple(stored[name].size)}, not {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in stored and tuple(stored[name].size) != tuple(tensor.shape)
    ]
    extra = [name for name in stored if name.startswith(("model/", "optimizer/")) and name not in names]
    faults += [f"also has {name}" for name in extra]
    if faults:
        raise EngineError(f"the checkpoint '{path}' is of another model: it {'; '.join(faults[:20])}")
