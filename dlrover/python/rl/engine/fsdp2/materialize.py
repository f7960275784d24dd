"""From a module on the meta device and a source of weights to a module that this rank has its part of."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.fsdp2.grid import Grid
from dlrover.python.rl.engine.fsdp2.shards import ParameterShard, Shards
from dlrover.python.rl.engine.fsdp2.tensor_parallel import restore_ties, split_matrices, ties
from dlrover.python.rl.engine.torch.outputs import VocabularyShard
from dlrover.python.rl.engine.torch.sources import Source, place_names

Absent: TypeAlias = Callable[[str, tuple[int, ...]], Any]
"""``absent(name, shape)``: the whole tensor that a source does not have, or None where it must have it."""


@dataclass(frozen=True)
class Making:
    """How a module is made.

    Attributes:
        device: where its tensors go.
        precision: torch dtype of the forward and backward pass. Trained parameters have float32 masters in any case.
        prefix: what the module puts before the names of its base model.
        rename: gives the source's name of one of the module's names.
        absent: makes tensors that the source does not have.
    """

    device: str = "cpu"
    precision: torch.dtype = torch.float32
    prefix: str = ""
    rename: Callable[[str], str] | None = None
    absent: Absent = lambda name, shape: None


@dataclass(frozen=True, eq=False)
class Materialized:
    """A module that computes, with this rank's part of its parameters.

    Attributes:
        module: call it as any module; every rank of its grid has to.
        shards: its parameters.
        buffers: its saved buffers, by name, whole on every rank.
        vocabulary: this rank's part of the logits, where ranks divide them.
    """

    module: Any
    shards: Shards
    buffers: Mapping[str, Any]
    vocabulary: VocabularyShard | None


def materialize(module: Any, source: Source | None, grid: Grid, making: Making) -> Materialized:
    """Divide a module between the ranks, give its parameters memory, and read their values.

    Each rank reads no more than its part. Buffers that are not on the meta device keep their values.

    Args:
        module: its parameters are on the meta device; it is changed in place.
        source: what to read; None leaves zeros.
        grid: the ranks.
        making: how.

    Raises:
        EngineError: the module cannot be divided as asked; the source lacks tensors, or has them in other shapes; or a
            buffer on the meta device has no value in it.
    """
    vocabulary: VocabularyShard | None = None
    summed: list[str] = []
    _set_precision(module, making.precision, whole=grid.shards is None)
    if grid.tensors is not None:
        vocabulary, summed = split_matrices(module, grid.tensors)
    if grid.shards is not None:
        _shard(module, grid, making)
    _allocate(module, making.device)
    shards = Shards.of(module, grid, summed)
    saved = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    if source is not None:
        _fill(shards, buffers, source, making)
    return Materialized(module, shards, buffers, vocabulary)


def _set_precision(module: Any, precision: torch.dtype, whole: bool) -> None:
    """Parameters to the precision they are kept in: sharded ones that are trained stay float32."""
    for parameter in module.parameters():
        if whole or not parameter.requires_grad:
            parameter.data = parameter.data.to(precision)


def _shard(module: Any, grid: Grid, making: Making) -> None:
    policy = MixedPrecisionPolicy()
    if making.precision != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=making.precision, reduce_dtype=torch.float32)
    names = _units(module)
    for part in [part for part in module.modules() if type(part).__name__ in names and part is not module]:
        fully_shard(part, mesh=grid.shards, mp_policy=policy)
    fully_shard(module, mesh=grid.shards, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):  # Gradients add up: the loss carries the normaliser.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _units(module: Any) -> set[str]:
    """Names of the classes of modules whose parameters are gathered together: the module says which."""
    given: Iterable[Any] = (
        getattr(module, "non_split_modules", None) or getattr(module, "_no_split_modules", None) or ()
    )
    return {unit if isinstance(unit, str) else unit.__name__ for unit in given}


def _allocate(module: Any, device: str) -> None:
    """Zeros in place of meta tensors. What is not on the meta device moves to ``device`` with its values."""
    if lost := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise EngineError(
            f"buffers without values: {', '.join(lost)}; build the module where only parameters are without memory"
        )
    bound = ties(module)
    module._apply(lambda tensor: torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    restore_ties(module, bound)


def _fill(shards: Shards, buffers: Mapping[str, Any], source: Source, making: Making) -> None:
    shapes = source.shapes()
    wanted = {shard.name: shard.names for shard in shards} | {name: (name,) for name in buffers}
    found = place_names(wanted, shapes, making.prefix, making.rename)
    made = {shard.name: making.absent(shard.name, shard.shape) for shard in shards if shard.name not in found}
    lacking = [name for name, tensor in made.items() if tensor is None]
    lacking += [
        f"{shard.name} of shape {shard.shape} (it has {shapes[found[shard.name]]})"
        for shard in shards
        if shard.name in found and tuple(shapes[found[shard.name]]) != shard.shape
    ]
    if lacking:
        raise EngineError(f"the checkpoint lacks {', '.join(sorted(lacking))}")
    with torch.no_grad():
        for shard in shards:
            if shard.master.numel():
                shard.master.copy_(_part(shard, shards.grid, found, made, source))
            shard.refresh()
        for name, buffer in buffers.items():
            if name in found:
                buffer.copy_(source.read(found[name], (slice(None),) * buffer.ndim))


def _part(shard: ParameterShard, grid: Grid, found: Mapping[str, str], made: Mapping[str, Any], source: Source) -> Any:
    ranges = shard.ranges(grid)
    return source.read(found[shard.name], ranges) if shard.name in found else made[shard.name][ranges]
