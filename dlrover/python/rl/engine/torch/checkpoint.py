"""A model with its optimizer on disk, each rank its part, through ``torch.distributed.checkpoint``.

A folder holds what the layout that wrote it had; another layout, and another engine, reads its own parts of it.
"""

import glob
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.layout import Layout
from dlrover.python.rl.engine.torch.loading import flush
from dlrover.python.rl.engine.torch.randomness import packed_random_state, set_packed_random_state
from dlrover.python.rl.engine.torch.ranks import Ranks

_VERSION, _LAYOUT = "version", "layout"


def write_folder(path: Path, ranks: Ranks, write: Callable[[Path], None]) -> None:
    """Let every rank write its files to a new folder, which then takes the place of ``path``.

    Whenever a process is killed, :func:`present` finds the old folder or the new one, never a part. What earlier writes
    left behind that were killed is removed.

    Args:
        path: the folder, where all ranks see it.
        ranks: all of the engine, which all have to call.
        write: writes this rank's files to the folder that it is given.

    Raises:
        EngineError: a rank could not write, which all say; the old folder is as it was, and nothing is left of the new.
    """
    fresh = path.with_name(f".{path.name}.new-{ranks.gather(uuid.uuid4().hex)[0]}")
    try:
        _together(path, ranks, lambda: _fill(fresh, write))
    except EngineError:
        if ranks.rank == 0:
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    _together(path, ranks, lambda: None if ranks.rank else _take_place(path, fresh))


def _together(path: Path, ranks: Ranks, act: Callable[[], None]) -> None:
    """Act on every rank; none goes on before all have."""
    fault = ""
    cause: BaseException | None = None
    try:
        act()
    except (OSError, RuntimeError, CheckpointException) as error:
        fault, cause = f"the checkpoint '{path}' cannot be written: {error}", error
    try:
        ranks.agree(fault)
    except EngineError as error:
        raise error from cause


def _fill(fresh: Path, write: Callable[[Path], None]) -> None:
    fresh.mkdir(parents=True, exist_ok=True)
    write(fresh)


def _take_place(path: Path, fresh: Path) -> None:
    if path.exists():
        path.rename(path.with_name(f".{path.name}.old-{time.time_ns():020}"))
    fresh.rename(path)
    flush(path.parent)
    for left in (*_beside(path, "new"), *_beside(path, "old")):
        shutil.rmtree(left, ignore_errors=True)


def _beside(path: Path, kind: str) -> list[Path]:
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.{kind}-*"))


def present(path: Path) -> Path:
    """``path``; or the folder that a write had moved aside when it was killed, the new one not yet there: the last
    one, where some could not be removed."""
    aside = _beside(path, "old")
    return path if path.exists() or not aside else aside[-1]


def write_checkpoint(path: Path, ranks: Ranks, layout: Layout, tensors: Mapping[str, Any], version: int) -> None:
    """Write all that later steps depend on, whole or not at all.

    Args:
        path: the folder; replaced whole if it is there.
        ranks: all of the engine, which all have to call.
        layout: how they divide the model.
        tensors: by name, DTensors where ranks divide them; as :func:`model_tensor` and :func:`optimizer_tensor` name
            them, engines understand each other.
        version: of the weights.

    Raises:
        EngineError: some rank could not write.
    """
    tree = {
        **tensors,
        _VERSION: torch.tensor(version),
        _LAYOUT: torch.tensor(layout.shape),
        _random(ranks): packed_random_state(),
    }

    def write(fresh: Path) -> None:
        with _quiet():
            dcp.save(tree, checkpoint_id=fresh, no_dist=ranks.world_size == 1)

    write_folder(path, ranks, write)


def model_tensor(name: str) -> str:
    """What a checkpoint calls the float32 weights of the parameter that Hugging Face calls ``name``."""
    return f"model/{name}"


def optimizer_tensor(name: str, kind: str) -> str:
    """What a checkpoint calls AdamW's ``step``, ``exp_avg`` and ``exp_avg_sq`` of a parameter."""
    return f"optimizer/{name}/{kind}"


def read_checkpoint(
    path: Path, ranks: Ranks, layout: Layout, tensors: Mapping[str, Any], names: Collection[str] | None = None
) -> int:
    """Read what :func:`write_checkpoint` wrote into ``tensors``, in place; return the version.

    In the layout that wrote it, the process's random state comes back too.

    Args:
        path: the folder.
        ranks: all of the engine, which all have to call.
        layout: how they divide the model.
        tensors: this rank's, by name.
        names: those of all ranks together, where that is more.

    Raises:
        EngineError: there is no checkpoint, or it is of another model or optimizer.
    """
    folder = present(path)
    if not (folder / ".metadata").is_file():
        raise EngineError(f"no checkpoint at '{path}'")
    reader = dcp.FileSystemReader(folder)
    there = reader.read_metadata().state_dict_metadata
    _check(path, tensors, names or tensors.keys(), there)
    own = _random(ranks)
    tree: dict[str, Any] = {**tensors, _VERSION: torch.tensor(0), _LAYOUT: torch.zeros(5, dtype=torch.int64)}
    if own in there:
        tree[own] = torch.zeros(there[own].size, dtype=torch.uint8)
    try:
        with _quiet():
            dcp.load(tree, storage_reader=reader, no_dist=ranks.world_size == 1)
    except CheckpointException as error:
        raise EngineError(f"the checkpoint '{path}' cannot be read: {error}") from error
    if own in tree and tuple(tree[_LAYOUT].tolist()) == layout.shape:
        set_packed_random_state(tree[own])
    return int(tree[_VERSION])


@contextmanager
def _quiet() -> Iterator[None]:
    """A single process is told that it is one, although it said so itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _random(ranks: Ranks) -> str:
    return f"random-{ranks.rank}"


def _check(path: Path, tensors: Mapping[str, Any], names: Collection[str], there: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of something else."""
    faults = [f"lacks {name}" for name in names if name not in there]
    faults += [
        f"has {name} of shape {tuple(there[name].size)}, not {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in there and tuple(there[name].size) != tuple(tensor.shape)
    ]
    kinds = (model_tensor(""), "optimizer/")
    faults += [f"has {name} besides" for name in there if name.startswith(kinds) and name not in names]
    if faults:
        raise EngineError(f"the checkpoint '{path}' is of another model: it {'; '.join(faults[:20])}")
