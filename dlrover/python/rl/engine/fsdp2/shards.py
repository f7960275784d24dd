"""A model's parameters as this rank has them: parts of float32 masters, their gradients, and whole tensors again."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from dlrover.python.rl.engine.fsdp2.grid import Grid, gather_rows
from dlrover.python.rl.engine.torch.ranks import Ranks, sum_tensors
from dlrover.python.rl.engine.torch.sources import Ranges
from dlrover.python.rl.engine.torch.stepping import first_bad


@dataclass(eq=False)
class ParameterShard:
    """This rank's part of one parameter.

    Attributes:
        name: its name in the module, the first one where it is tied.
        names: all its names.
        parameter: the module's: plain, or a DTensor.
        master: plain tensor of this rank's part, which is loaded, trained and saved. It shares the parameter's memory,
            unless a trained parameter is computed with in lower precision.
        shape: of the whole parameter.
        sharded: whether the ranks of :attr:`Grid.shards` divide its first dimension (after ``tensor_dim``).
        tensor_dim: the dimension that the ranks of :attr:`Grid.tensors` divide, or None.
        summed: whether its gradients on the ranks of :attr:`Grid.tensors` add up.
    """

    name: str
    names: tuple[str, ...]
    parameter: Any
    master: Any
    shape: tuple[int, ...]
    sharded: bool = False
    tensor_dim: int | None = None
    summed: bool = False

    @property
    def trained(self) -> bool:
        """Whether steps change it."""
        return bool(self.parameter.requires_grad)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: not to vectors."""
        return len(self.shape) >= 2

    def ranges(self, grid: Grid) -> Ranges:
        """Which part of the whole parameter this rank has."""
        bounds = [(0, size) for size in self.shape]
        if self.tensor_dim is not None:
            bounds[self.tensor_dim] = _chunk(bounds[self.tensor_dim], grid.layout.tensor, grid.place.tensor)
        if self.sharded:
            bounds[0] = _chunk(bounds[0], grid.shard_size, grid.shard_rank)
        return tuple(slice(*bound) for bound in bounds)

    def whole(self, local: Any, grid: Grid) -> Any:
        """The whole tensor of which each rank has a part like ``local``. A collective."""
        if self.sharded:
            rows = self.shape[0] // (grid.layout.tensor if self.tensor_dim == 0 else 1)
            local = gather_rows(local, rows, grid.shards.get_group())
        if self.tensor_dim is not None:
            parts = [torch.empty_like(local) for _ in range(grid.layout.tensor)]
            dist.all_gather(parts, local.contiguous(), group=grid.tensors.get_group())
            local = torch.cat(parts, dim=self.tensor_dim)
        return local

    def as_dtensor(self, local: Any) -> Any:
        """``local``, a part like the master, as what a distributed checkpoint knows how to divide."""
        if not isinstance(self.parameter, DTensor):
            return local
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        stride = self.parameter.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(self.shape), stride=stride)

    def take_gradient(self) -> None:
        """Move the parameter's gradient to its master's, in float32, adding to what is there."""
        gradient, parameter = self.parameter.grad, self.parameter
        if gradient is None or self.master is parameter:
            return
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements).to_local()
        parameter.grad = None
        if self.master.grad is None:
            self.master.grad = gradient.to(self.master.dtype)
        else:
            self.master.grad += gradient

    def refresh(self) -> None:
        """Let the module compute with what the master holds now."""
        if self.master.dtype != self.parameter.dtype:
            plain(self.parameter).copy_(self.master)


def _chunk(bound: tuple[int, int], parts: int, part: int) -> tuple[int, int]:
    """Part ``part`` of ``parts``, as ``torch.chunk`` cuts; the last ones may be empty."""
    start, stop = bound
    size = -(-(stop - start) // parts)
    return min(start + part * size, stop), min(start + (part + 1) * size, stop)


def plain(parameter: Any) -> Any:
    """A parameter's memory on this rank as a plain tensor."""
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, eq=False)
class Shards:
    """All parameters of a module on this rank, in the module's order."""

    grid: Grid
    items: tuple[ParameterShard, ...]

    @classmethod
    def of(cls, module: Any, grid: Grid, summed: Iterable[str] = ()) -> "Shards":
        """Those of a module whose parameters are divided already, and allocated."""
        summed = set(summed)
        names: dict[int, list[str]] = {}
        parameters = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        return cls(grid, tuple(_shard(tuple(found), parameters[key], summed) for key, found in names.items()))

    def __iter__(self) -> Iterator[ParameterShard]:
        return iter(self.items)

    @property
    def trained(self) -> list[ParameterShard]:
        """Those that steps change."""
        return [shard for shard in self.items if shard.trained]

    def take_gradients(self) -> list[Any]:
        """The masters' gradients, summed over copies of the model; zeros where a parameter took no part."""
        for shard in self.trained:
            shard.take_gradient()
            if shard.master.grad is None:
                shard.master.grad = torch.zeros_like(shard.master)
        if summed := [shard.master.grad for shard in self.trained if shard.summed]:
            sum_tensors(summed, self.grid.tensors.get_group())
        gradients = [shard.master.grad for shard in self.trained]
        if self.grid.copies is not None:
            sum_tensors(gradients, self.grid.copies)
        return gradients

    def gradient_norm(self, ranks: Ranks) -> float:
        """Of the gradient of the whole model, to the same bit on every rank: the sums are taken in the ranks' order."""
        norms = torch.stack([torch.linalg.vector_norm(shard.master.grad) for shard in self.trained]).double()
        # What ranks have in common counts once.
        tensor = self.grid.layout.tensor
        alike = [tensor if shard.tensor_dim is None else 1 for shard in self.trained]
        squares = sum(norm * norm / same for norm, same in zip(norms.tolist(), alike, strict=True))
        return math.sqrt(sum(ranks.gather(squares if self.grid.place.ddp == 0 else 0.0)))

    def first_bad_gradient(self, ranks: Ranks) -> str:
        """The name of the first parameter whose gradient is not finite on some rank."""
        names = {shard.name: index for index, shard in enumerate(self.trained)}
        told = ranks.gather(first_bad({shard.name: shard.master.grad for shard in self.trained}))
        return str(min(told, key=lambda name: names.get(name, len(names))))

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for shard in self.items:
            shard.parameter.grad = shard.master.grad = None


def _shard(names: tuple[str, ...], parameter: Any, summed: set[str]) -> ParameterShard:
    master = parameter if type(parameter) is torch.nn.Parameter else plain(parameter)
    sharded, tensor_dim = False, None
    if isinstance(parameter, DTensor):
        for dimension, placement in zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True):
            if dimension == "shard":
                sharded = True
            elif isinstance(placement, Shard):
                tensor_dim = placement.dim
        # A plain view would be another tensor at each call, and gradients are hung on it.
        master = plain(parameter)
    if parameter.requires_grad and parameter.dtype != torch.float32:
        master = torch.empty_like(plain(parameter), dtype=torch.float32)
    shard = ParameterShard(
        names[0], names, parameter, master, tuple(parameter.shape), sharded, tensor_dim, names[0] in summed
    )
    if master.dtype != parameter.dtype:
        # Gradients of micro-batches add up in float32.
        parameter.register_post_accumulate_grad_hook(lambda _: shard.take_gradient())
    return shard
