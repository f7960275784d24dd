# SPDX-License-Identifier: Apache-2.0
"""The interface of train backends, and their checkpoints through ``torch.distributed.checkpoint``.

Each rank writes its part. Another layout, and another engine, can read its parts of what a layout has written.
"""

import glob
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import TokenLoss
from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.loading import sync_to_disk
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks, pack_random_state, unpack_random_state


class TrainBackend(Protocol):
    """This rank's part of a model and, unless frozen, of its optimizer. All ranks call every method together."""

    parked: ParkedTensors
    module: Any
    """The model, whose passes a wrapper may run."""

    @property
    def packs(self) -> bool:
        """It keeps packed documents apart."""

    @property
    def limits(self) -> tuple[int, int | None]:
        """Vocabulary size, and maximum tokens of a row or None."""

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        """Each micro-batch with the values that ``gather_outputs`` takes, without gradient."""

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        """Add the loss's gradients; returns sums for ``check_loss``, empty on ranks that another one reports for."""

    def reduce_gradients(self) -> list[Any]:
        """Sum the gradients over the ranks; returns this rank's part of them."""

    def gradient_norm(self) -> float:
        """Of the whole gradient: the same bits on every rank."""

    def first_bad_gradient(self) -> str:
        """Name of the first parameter whose gradient is not finite, the same on every rank."""

    def update(self, version: int, norm: float) -> float:
        """Clip the gradient of norm ``norm`` and take the step after ``version``; returns the learning rate."""

    def drop_gradients(self) -> None: ...

    def named_weights(self, dtype: Any = None, merged: bool = True) -> Iterator[tuple[str, Any]]:
        """See ``BaseTrainEngine.named_weights``; unless ``merged``, without the adapters."""

    def named_adapters(self) -> Iterator[tuple[str, Any]]:
        """Name and whole tensor of each matrix of an adapter. A collective, as the weights are."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of :meth:`named_weights`."""

    def write_weights(self, weights: WeightSnapshot) -> None:
        """Adopt a verified snapshot."""

    def local_state(self) -> dict[str, Any]:
        """``layout``, ``model`` and ``optimizer`` (None if frozen): the live tensors."""

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        """See :func:`restore_state`."""

    def write_checkpoint(self, path: Path, version: int) -> None:
        """Write everything to the folder ``path``, each rank its part, atomically."""

    def read_checkpoint(self, path: Path) -> int:
        """Restore :meth:`write_checkpoint`; returns the version. Raises an ``EngineError`` if it does not fit."""

    def release(self) -> None:
        """Undo side effects; the backend is not used again, and its tensors are emptied next."""


_VERSION, _LAYOUT = "version", "layout"


def write_folder(path: Path, ranks: Ranks, write: Callable[[Path], None]) -> None:
    """Let every rank write its files to a new folder, which then replaces ``path``.

    Whenever a process is killed, :func:`present` finds the old folder or the new one, never a part. Remains of earlier
    killed writes are removed.

    Raises:
        EngineError: a rank could not write; on all ranks. The old folder is unchanged, the new one is removed.
    """
    new = path.with_name(f".{path.name}.new-{ranks.gather(uuid.uuid4().hex)[0]}")

    def fill() -> None:
        new.mkdir(parents=True, exist_ok=True)
        write(new)

    try:
        _run_on_all(path, ranks, fill)
    except EngineError:
        if ranks.rank == 0:
            shutil.rmtree(new, ignore_errors=True)
        raise
    _run_on_all(path, ranks, lambda: None if ranks.rank else _replace(path, new))


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


def _replace(path: Path, new: Path) -> None:
    if path.exists():
        path.rename(path.with_name(f".{path.name}.old-{time.time_ns():020}"))
    new.rename(path)
    sync_to_disk(path.parent)
    for leftover in (*_beside(path, "new"), *_beside(path, "old")):
        shutil.rmtree(leftover, ignore_errors=True)


def _beside(path: Path, kind: str) -> list[Path]:
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.{kind}-*"))


def present(path: Path) -> Path:
    """``path``, or the last folder that a killed write had moved aside before the new one was in place."""
    aside = _beside(path, "old")
    return path if path.exists() or not aside else aside[-1]


def write_checkpoint(path: Path, ranks: Ranks, layout: Layout, tensors: Mapping[str, Any], version: int) -> None:
    """Write ``tensors`` (DTensors if ranks divide them), version, layout and random state, atomically."""
    about = {_VERSION: torch.tensor(version), _LAYOUT: torch.tensor(layout.shape)}
    tree = {**tensors, **about, _random_key(ranks): pack_random_state()}

    def write(new: Path) -> None:
        with _without_warning():
            dcp.save(tree, checkpoint_id=new, no_dist=ranks.world_size == 1)

    write_folder(path, ranks, write)


def model_tensor(name: str) -> str:
    """A checkpoint's name of the float32 weights of the parameter that Hugging Face calls ``name``."""
    return f"model/{name}"


def optimizer_tensor(name: str, kind: str) -> str:
    return f"optimizer/{name}/{kind}"


def read_checkpoint(
    path: Path, ranks: Ranks, layout: Layout, tensors: Mapping[str, Any], names: Collection[str] | None = None
) -> int:
    """Read a checkpoint into this rank's ``tensors``, in place; returns the version. The same layout restores the
    random state too. ``names`` are those of all ranks together, if there are more.

    Raises:
        EngineError: there is no checkpoint, or it is of another model or optimizer.
    """
    folder = present(path)
    if not (folder / ".metadata").is_file():
        raise EngineError(f"no checkpoint at '{path}'")
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    _check(path, tensors, names or tensors.keys(), stored)
    own = _random_key(ranks)
    tree: dict[str, Any] = {**tensors, _VERSION: torch.tensor(0), _LAYOUT: torch.zeros(5, dtype=torch.int64)}
    if own in stored:
        tree[own] = torch.zeros(stored[own].size, dtype=torch.uint8)
    try:
        with _without_warning():
            dcp.load(tree, storage_reader=reader, no_dist=ranks.world_size == 1)
    except CheckpointException as error:
        raise EngineError(f"the checkpoint '{path}' cannot be read: {error}") from error
    if own in tree and tuple(tree[_LAYOUT].tolist()) == layout.shape:
        unpack_random_state(tree[own])
    return int(tree[_VERSION])


@contextmanager
def _without_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _random_key(ranks: Ranks) -> str:
    return f"random-{ranks.rank}"


def _check(path: Path, tensors: Mapping[str, Any], names: Collection[str], stored: Mapping[str, Any]) -> None:
    faults = [f"lacks {name}" for name in names if name not in stored]
    faults += [
        f"has {name} of shape {tuple(stored[name].size)}, not {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in stored and tuple(stored[name].size) != tuple(tensor.shape)
    ]
    kinds = (model_tensor(""), "optimizer/")
    faults += [f"also has {name}" for name in stored if name.startswith(kinds) and name not in names]
    if faults:
        raise EngineError(f"the checkpoint '{path}' is of another model: it {'; '.join(faults[:20])}")
