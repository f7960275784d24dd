"""A model with its optimizer on disk, each rank its part, through ``torch.distributed.checkpoint``.

A folder holds what the layout that wrote it had; another layout, and another engine, reads its own parts of it.
"""

import shutil
import struct
import uuid
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.engine.layout import Layout
from dlrover.python.rl.engine.torch.randomness import random_state, set_random_state
from dlrover.python.rl.engine.torch.ranks import Ranks

_VERSION, _LAYOUT = "version", "layout"


@contextmanager
def fresh_folder(path: Path, ranks: Ranks) -> Iterator[Path]:
    """A folder that all ranks write to, and that takes the place of ``path`` at the end: a reader sees the old folder
    or the new one, never a part."""
    fresh = path.with_name(f".{path.name}.new-{ranks.gather(uuid.uuid4().hex)[0]}")
    fresh.mkdir(parents=True, exist_ok=True)
    yield fresh
    ranks.gather(None)  # Everybody has written.
    if ranks.rank == 0:
        old = path.with_name(f".{path.name}.old-{uuid.uuid4().hex}")
        if path.exists():
            path.rename(old)
        fresh.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    ranks.gather(None)  # None goes on before the folder is there.


def write_checkpoint(path: Path, ranks: Ranks, layout: Layout, tensors: Mapping[str, Any], version: int) -> None:
    """Write all that later steps depend on, whole or not at all.

    Args:
        path: the folder; replaced whole if it is there.
        ranks: all of the engine, which all have to call.
        layout: how they divide the model.
        tensors: by name, DTensors where ranks divide them; as :func:`model_tensor` and :func:`optimizer_tensor` name
            them, engines understand each other.
        version: of the weights.
    """
    tree = {
        **tensors,
        _VERSION: torch.tensor(version),
        _LAYOUT: torch.tensor(layout.shape),
        _random(ranks): _as_tensor(random_state()),
    }
    with fresh_folder(path, ranks) as fresh, _quiet():
        dcp.save(tree, checkpoint_id=fresh, no_dist=ranks.world_size == 1)


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
    if not (path / ".metadata").is_file():
        raise EngineError(f"no checkpoint at '{path}'")
    reader = dcp.FileSystemReader(path)
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
        set_random_state(_from_tensor(tree[own]))
    return int(tree[_VERSION])


@contextmanager
def _quiet() -> Iterator[None]:
    """A single process is told that it is one, although it said so itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _as_tensor(state: dict[str, Any]) -> Any:
    """A tree as bytes: the lengths of its parts, then the parts."""
    skeleton, buffers = state_tree.dump(state)
    parts = [skeleton, *map(bytes, buffers)]
    lengths = struct.pack(f"<{len(parts) + 1}q", len(parts), *map(len, parts))
    return torch.frombuffer(bytearray(lengths + b"".join(parts)), dtype=torch.uint8)


def _from_tensor(packed: Any) -> Any:
    content = packed.numpy().tobytes()
    (count,) = struct.unpack_from("<q", content)
    lengths = struct.unpack_from(f"<{count}q", content, 8)
    ends = list(accumulate(lengths, initial=8 * (count + 1)))
    skeleton, *buffers = (content[start:end] for start, end in pairwise(ends))
    return state_tree.load(skeleton, [memoryview(buffer) for buffer in buffers])


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
