# SPDX-License-Identifier: Apache-2.0
"""The ranks' process groups, and a model's parameters on this rank: shards, gradients and their sums."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.device_bytes import copy_to_host
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.model.loading import Ranges, list_aliases
from dlrover.python.rl.engine.model.ranks import Ranks, gather_padded, gather_parts, sum_tensors
from dlrover.python.rl.engine.training.adapters import QuantizedLinear, quantized_layers


@dataclass(frozen=True, eq=False)
class Grid:
    """This rank's place in the layout, and its groups. Ranks that share a sequence shard the parameters too."""

    layout: Layout  # sizes of the dimensions
    place: Layout  # this rank's coordinates
    shards: Any = None  # mesh of the ranks that divide the parameters (ZeRO-3)
    tensors: Any = None  # mesh of the ranks that split each matrix
    copies: Any = None  # process group of the ranks with the same part of each copy
    context: Any = None  # process group of the ranks that share a sequence

    @classmethod
    def of(cls, ranks: Ranks, sizes: ParallelSizes, device: str = "cpu") -> "Grid":
        """Divide the ranks, all of which call this. Raises an ``EngineError`` if the sizes do not divide them."""
        layout = Layout.of(ranks.world_size, sizes)
        place = layout.coordinates(ranks.rank)
        if ranks.world_size == 1:
            return cls(layout, place)
        kind = torch.device(device).type
        shape = (layout.ddp, layout.shard * layout.context, layout.tensor)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("copy", "shard", "tensor"))
        context = None
        if layout.context > 1:
            rows = (layout.ddp * layout.shard, layout.context, layout.tensor)
            context = init_device_mesh(kind, rows, mesh_dim_names=("replica", "context", "part")).get_group("context")
            ranks.set_timeout(context)
        ranks.set_timeout(*mesh.get_all_groups())
        return cls(
            layout,
            place,
            mesh["shard"] if shape[1] > 1 else None,
            mesh["tensor"] if shape[2] > 1 else None,
            mesh.get_group("copy") if shape[0] > 1 else None,
            context,
        )

    @property
    def shard_size(self) -> int:
        return self.layout.shard * self.layout.context

    @property
    def shard_rank(self) -> int:
        return self.place.shard * self.layout.context + self.place.context


@dataclass(eq=False)
class ParameterShard:
    """This rank's part of one parameter."""

    names: tuple[str, ...]  # in the module, several if it is tied
    parameter: Any  # the module's: plain, or a DTensor
    master: Any
    """Plain tensor of this rank's part, which is loaded, trained and saved. It shares the parameter's memory, unless
    passes use a lower precision, or the master is in host memory."""

    shape: tuple[int, ...]  # of the whole parameter
    sharded: bool = False  # the ranks of `Grid.shards` divide its first dimension (after `tensor_dim`)
    tensor_dim: int | None = None  # the dimension that the ranks of `Grid.tensors` divide
    summed: bool = False  # its gradients on the ranks of `Grid.tensors` add up
    on_host: bool = False  # the master is in host memory, wherever the parameter is
    quantized: QuantizedLinear | None = None  # the layer whose frozen weight it is; parameter and master are packed
    _gradient: Any = None  # of a master on the host, on the parameter's device
    _host_gradient: Any = None  # its copy on the host, reused since new memory is slow

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def gradient(self) -> Any:
        """The master's gradient, in float32 on the parameter's device; None before a backward pass."""
        return self._gradient if self.on_host else self.master.grad

    @gradient.setter
    def gradient(self, gradient: Any) -> None:
        if self.on_host:
            self._gradient = gradient
        else:
            self.master.grad = gradient

    @property
    def trained(self) -> bool:
        return bool(self.parameter.requires_grad)

    @property
    def decays(self) -> bool:
        return len(self.shape) >= 2

    def fill(self, part: Any, grid: Grid) -> None:
        """Copy :meth:`ranges` of the whole parameter to the master."""
        if self.quantized is None:
            self.master.copy_(part)
        else:
            self.quantized.store(part, self.master, grid.shard_rank)

    def ranges(self, grid: Grid) -> Ranges:
        """Return this rank's part of the whole parameter; for a quantized one the rows that contain it."""
        if self.quantized is not None:
            return self.quantized.rows_of(grid.shard_rank), slice(None)
        bounds = [(0, size) for size in self.shape]
        if self.tensor_dim is not None:
            bounds[self.tensor_dim] = _chunk(bounds[self.tensor_dim], grid.layout.tensor, grid.place.tensor)
        if self.sharded:
            bounds[0] = _chunk(bounds[0], grid.shard_size, grid.shard_rank)
        return tuple(slice(*bound) for bound in bounds)

    def whole(self, local: Any, grid: Grid) -> Any:
        """Gather the whole tensor of which each rank has a part like ``local``. A collective."""
        if self.sharded:
            rows = self.parameter.shape[0] // (grid.layout.tensor if self.tensor_dim == 0 else 1)
            # torch.chunk has divided the rows: the last ranks may have fewer.
            local = gather_padded(local, -(-rows // grid.shard_size), grid.shards.get_group())[:rows]
        if self.tensor_dim is not None:
            local = torch.cat(gather_parts(local, grid.tensors.get_group()), dim=self.tensor_dim)
        return local

    def as_dtensor(self, local: Any) -> Any:
        """Return ``local``, a part like the master, as a DTensor if ranks divide the parameter."""
        if not isinstance(self.parameter, DTensor):
            return local
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        shape, stride = torch.Size(self.shape), self.parameter.stride()
        if local.shape != self.master.shape:  # the scales of its rows
            shape = torch.Size((self.shape[0], *local.shape[1:]))
            stride = torch.empty(shape, device="meta").stride()
        if self.on_host:  # from_local would make a copy on the mesh's device
            spec = DTensorSpec(mesh, placements, TensorMeta(shape, stride, local.dtype))
            return DTensor(local, spec, requires_grad=False)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def take_gradient(self) -> None:
        """Add the parameter's gradient to its master's, in float32, and clear it."""
        gradient, parameter = self.parameter.grad, self.parameter
        if gradient is None or self.master is parameter:
            return
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements).to_local()
        parameter.grad = None
        if self.gradient is None:
            self.gradient = gradient.to(self.master.dtype)
        else:
            self.gradient += gradient

    def copy_gradient_to_host(self) -> None:
        """Copy the gradient to a master on the host."""
        if not self.on_host:
            return
        if self._host_gradient is None:
            self._host_gradient = torch.empty_like(self.master)
        copy_to_host(self._gradient, self._host_gradient)
        self.master.grad, self._gradient = self._host_gradient, None

    @torch.no_grad()
    def refresh(self, locate: Callable[[Any], Any] = torch.Tensor.detach) -> None:
        """Copy the master to the parameter if it has separate memory; ``locate`` gives the memory of both."""
        if self.on_host or self.master.dtype != self.parameter.dtype:
            target = locate(to_local_tensor(self.parameter))
            target.copy_(locate(self.master).to(target.device))  # cast there


def _chunk(bound: tuple[int, int], parts: int, part: int) -> tuple[int, int]:
    """Return part number ``part`` of ``parts``, as ``torch.chunk`` cuts them; the last ones may be empty."""
    start, stop = bound
    size = -(-(stop - start) // parts)
    return min(start + part * size, stop), min(start + (part + 1) * size, stop)


def to_local_tensor(parameter: Any) -> Any:
    """Return a parameter's memory on this rank as a plain tensor."""
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, eq=False)
class Shards:
    """All parameters of a module on this rank, in the module's order."""

    grid: Grid
    items: tuple[ParameterShard, ...]

    @classmethod
    def of(cls, module: Any, grid: Grid, summed: Collection[str], on_host: bool = False) -> "Shards":
        """List the shards of a module whose parameters are divided and allocated, perhaps with masters ``on_host``."""
        quantized, items = quantized_layers(module), []
        for names in list_aliases(module):
            layer = quantized.get(names[0])
            if layer is None:
                items.append(_make_shard(module, names, summed, on_host))
                continue
            packed, is_divided = to_local_tensor(layer.weight), isinstance(layer.weight, DTensor)
            items.append(ParameterShard(names, layer.weight, packed, tuple(layer.shape), is_divided, quantized=layer))
        return cls(grid, tuple(items))

    def __iter__(self) -> Iterator[ParameterShard]:
        return iter(self.items)

    @property
    def trained(self) -> list[ParameterShard]:
        return [shard for shard in self.items if shard.trained]

    def take_gradients(self, sum_copies: Callable[[], None] | None = None) -> list[Any]:
        """Return the masters' gradients, summed over copies of the model; zeros for unused parameters."""
        trained = self.trained
        for shard in trained:
            shard.take_gradient()
            if shard.gradient is None:
                shard.gradient = torch.zeros_like(to_local_tensor(shard.parameter), dtype=shard.master.dtype)
        if summed := [shard.gradient for shard in trained if shard.summed]:
            sum_tensors(summed, self.grid.tensors.get_group())
        gradients = [shard.gradient for shard in trained]
        if sum_copies is not None:
            sum_copies()
        elif self.grid.copies is not None:
            sum_tensors(gradients, self.grid.copies)
        return gradients


def _make_shard(module: Any, names: tuple[str, ...], summed: Collection[str], on_host: bool) -> ParameterShard:
    parameter = module.get_parameter(names[0])
    master = parameter if type(parameter) is torch.nn.Parameter else to_local_tensor(parameter)
    sharded, tensor_dim = False, None
    if isinstance(parameter, DTensor):
        for dimension, placement in zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True):
            if dimension == "shard":
                sharded = True
            elif isinstance(placement, Shard):
                tensor_dim = placement.dim
        # One view for all uses: each call makes another tensor, and this one has the gradient.
        master = to_local_tensor(parameter)
    on_host = on_host and parameter.requires_grad
    if on_host:
        master = torch.empty(master.shape, dtype=torch.float32)
    elif parameter.requires_grad and parameter.dtype != torch.float32:
        master = torch.empty_like(to_local_tensor(parameter), dtype=torch.float32)
    shard = ParameterShard(
        names, parameter, master, tuple(parameter.shape), sharded, tensor_dim, names[0] in summed, on_host
    )
    if master.dtype != parameter.dtype:
        # The gradients of micro-batches add up in float32.
        parameter.register_post_accumulate_grad_hook(lambda _: shard.take_gradient())
    return shard


LARGE = 1 << 18
"""Maximum elements of gradients that are joined for one sum, since each sum has a latency."""

T = TypeVar("T")


class CopySums:
    """Sums gradients over the copies of a model while the backward pass computes others.

    ::

        last backward pass of a step --> a part's gradients are complete --> its sum over the copies starts -,
        end of the pass              --> the sums of all other parts start ----------------------------------+-> wait

    Every rank sums the parts in the same order, the order of a backward pass, whichever gradients come first. A step
    sums all of them even if it fails on some ranks, since the next step's sums would match the remaining ones."""

    def __init__(self, shards: Sequence[ParameterShard], group: Any) -> None:
        self._group = group
        self._parts = list(_join_small(shard for shard in reversed(shards) if not shard.summed))
        if summed := [shard for shard in shards if shard.summed]:  # over tensor-parallel ranks first, after the pass
            self._parts.append(summed)
        self._reset()
        for index, part in enumerate(self._parts):
            for shard in part if not part[0].summed else ():
                shard.parameter.register_post_accumulate_grad_hook(partial(self._take, shard, index))

    def _reset(self) -> None:
        self._is_stepping = self._is_last_pass = False
        self._running: list[tuple[Any, Any, list[Any]]] = []  # for each part: its sum, the memory, the gradients
        self._missing = [{shard.name for shard in part} for part in self._parts]

    def begin_at_last(self, micros: Sequence[T]) -> Iterator[T]:
        """Yield the micro-batches of a step: the backward pass of the last one completes the gradients."""
        self._is_stepping = True
        for number, micro in enumerate(micros, start=1):
            self._is_last_pass = number == len(micros)
            yield micro

    def _take(self, shard: ParameterShard, index: int, _parameter: Any) -> None:
        if not self._is_last_pass:
            return
        if shard.name not in self._missing[index]:
            raise EngineError(f"one backward pass gave '{shard.name}' two gradients: copies of it cannot be summed")
        shard.take_gradient()
        self._missing[index].remove(shard.name)
        while len(self._running) < len(self._parts) and not self._missing[len(self._running)]:
            self._start_next()

    def _start_next(self) -> None:
        gradients = [shard.gradient for shard in self._parts[len(self._running)]]
        flat = gradients[0]  # a single one is summed in place
        if len(gradients) > 1 or not flat.is_contiguous():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._running.append((dist.all_reduce(flat, group=self._group, async_op=True), flat, gradients))

    def finish(self) -> None:
        """Complete the sums of all shards, each of which has a gradient by now."""
        self._is_last_pass = False
        while len(self._running) < len(self._parts):
            self._start_next()
        for work, flat, gradients in self._running:
            work.wait()  # waits: for the process group's timeout
            if flat is gradients[0]:
                continue
            if flat.is_cuda:  # FSDP may have begun the sum on another stream
                flat.record_stream(torch.cuda.current_stream())
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._reset()

    def forget(self) -> None:
        """Let the other ranks' sums end after the current step, if any, has failed."""
        works = [work for work, *_ in self._running]
        missing = self._parts[len(works) :] if self._is_stepping else []
        self._reset()
        for part in missing:
            size, local = sum(shard.master.numel() for shard in part), to_local_tensor(part[0].parameter)
            zeros = local.new_zeros(size, dtype=part[0].master.dtype)
            works.append(dist.all_reduce(zeros, group=self._group, async_op=True))
        for work in works:
            work.wait()  # waits: for the process group's timeout


def _join_small(shards: Iterable[ParameterShard]) -> Iterator[list[ParameterShard]]:
    """Yield large shards alone, and join the small ones between them, which are norms and biases."""
    small: list[ParameterShard] = []
    for shard in shards:
        if shard.master.numel() >= LARGE:
            yield [shard]
            continue
        small.append(shard)
        if sum(each.master.numel() for each in small) >= LARGE:
            yield small
            small = []
    if small:
        yield small
