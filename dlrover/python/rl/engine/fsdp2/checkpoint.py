"""A model with its optimizer on disk, each rank its part, through ``torch.distributed.checkpoint``.

A folder holds what the layout that wrote it had; another layout reads its own parts of it.
"""

import shutil
import struct
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.engine.fsdp2.materialize import Materialized
from dlrover.python.rl.engine.fsdp2.optimizer import MasterAdamW
from dlrover.python.rl.engine.torch.randomness import random_state, set_random_state
from dlrover.python.rl.engine.torch.ranks import Ranks

_VERSION, _LAYOUT = "version", "layout"


def write_checkpoint(path: Path, ranks: Ranks, made: Materialized, optimizer: MasterAdamW | None, version: int) -> None:
    """Write all that later steps depend on; a reader sees the old folder or the new one, never a part.

    Args:
        path: the folder; replaced whole if it is there.
        ranks: all of the engine, which all have to call.
        made: the model.
        optimizer: its optimizer, None for a frozen one.
        version: of the weights.
    """
    tree = _tensors(made, optimizer)
    tree |= {
        _VERSION: torch.tensor(version),
        _LAYOUT: torch.tensor(made.shards.grid.layout.shape),
        _random(ranks): _as_tensor(random_state()),
    }
    fresh = path.with_name(f".{path.name}.new-{ranks.gather(uuid.uuid4().hex)[0]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _quiet():
        dcp.save(tree, checkpoint_id=fresh, no_dist=ranks.world_size == 1)
    if ranks.rank == 0:
        old = path.with_name(f".{path.name}.old-{uuid.uuid4().hex}")
        if path.exists():
            path.rename(old)
        fresh.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    ranks.gather(None)  # None goes on before the folder is there.


def read_checkpoint(path: Path, ranks: Ranks, made: Materialized, optimizer: MasterAdamW | None) -> int:
    """Go back to what :func:`write_checkpoint` wrote; return the version.

    In the layout that wrote it, the process's random state comes back too.

    Raises:
        EngineError: there is no checkpoint, or it is of another model or optimizer.
    """
    if not (path / ".metadata").is_file():
        raise EngineError(f"no checkpoint at '{path}'")
    reader = dcp.FileSystemReader(path)
    there = reader.read_metadata().state_dict_metadata
    tree = _tensors(made, optimizer)
    _check(path, tree, there)
    own = _random(ranks)
    tree |= {_VERSION: torch.tensor(0), _LAYOUT: torch.zeros(5, dtype=torch.int64)}
    if own in there:
        tree[own] = torch.zeros(there[own].size, dtype=torch.uint8)
    try:
        with _quiet():
            dcp.load(tree, storage_reader=reader, no_dist=ranks.world_size == 1)
    except CheckpointException as error:
        raise EngineError(f"the checkpoint '{path}' cannot be read: {error}") from error
    for shard in made.shards:
        shard.refresh()
    if own in tree and tuple(tree[_LAYOUT].tolist()) == made.shards.grid.layout.shape:
        set_random_state(_from_tensor(tree[own]))
    return int(tree[_VERSION])


@contextmanager
def _quiet() -> Iterator[None]:
    """A single process is told that it is one, although it said so itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _random(ranks: Ranks) -> str:
    return f"random-{ranks.rank}"


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


def _tensors(made: Materialized, optimizer: MasterAdamW | None) -> dict[str, Any]:
    """The live tensors by name, in a form that says which part of the whole each is."""
    tree = {f"model/{shard.name}": shard.as_dtensor(shard.master.detach()) for shard in made.shards}
    tree |= {f"model/{name}": buffer for name, buffer in made.buffers.items()}
    for shard, state in optimizer.state() if optimizer else ():
        tree[f"optimizer/{shard.name}/step"] = state["step"]
        for kind in ("exp_avg", "exp_avg_sq"):
            tree[f"optimizer/{shard.name}/{kind}"] = shard.as_dtensor(state[kind])
    return tree


def _check(path: Path, tree: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of something else."""
    faults = [f"lacks {name}" for name in tree if name not in there]
    faults += [
        f"has {name} of shape {tuple(there[name].size)}, not {tuple(tensor.shape)}"
        for name, tensor in tree.items()
        if name in there and tuple(there[name].size) != tuple(tensor.shape)
    ]
    kinds = ("model/", "optimizer/")
    faults += [f"has {name} besides" for name in there if name.startswith(kinds) and name not in tree]
    if faults:
        raise EngineError(f"the checkpoint '{path}' is of another model: it {'; '.join(faults[:20])}")
