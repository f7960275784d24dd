# SPDX-License-Identifier: Apache-2.0
"""The parameters of Megatron's GPT on this rank, and the slices that its optimizer steps.

::

    buffer of weights   |-- a parameter --|- another -| ...    the same on all data-parallel ranks
    masters, moments    |-- of rank 0 ---|--- of rank 1 ---|   float32, divided (ZeRO-1, arXiv:1910.02054)

A checkpoint stores each rank's part under Hugging Face's names, for any layout and engine.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.megatron.conversion import (
    Form,
    Parameter,
    TransformerShape,
    join,
    list_parameters,
    pad_vocab,
    split,
)
from dlrover.python.rl.engine.model.ranks import gather_parts
from dlrover.python.rl.engine.training.backend import stored_name
from dlrover.python.rl.engine.training.stepping import MasterOptimizer


@dataclass(frozen=True, eq=False)
class Stage:
    """This rank in its model replica."""

    layout: Layout  # sizes of the dimensions
    place: Layout  # this rank's coordinates
    tensors: Any  # process group of the ranks that split each matrix
    pipeline: Any  # process group of the ranks that divide the layers
    data: Any  # process group of the data-parallel ranks, which have the same weights

    @property
    def is_last(self) -> bool:
        return self.place.pipeline == self.layout.pipeline - 1

    def from_stage(self, tensor: Any, stage: int) -> Any:
        """Overwrite ``tensor`` with pipeline stage ``stage``'s. A collective of all stages."""
        if self.layout.pipeline > 1:
            dist.broadcast(tensor, dist.get_process_group_ranks(self.pipeline)[stage], group=self.pipeline)
        return tensor


Locate: TypeAlias = Callable[[Any], Any]
"""Returns the current memory of a tensor, on the device or the host."""


@dataclass(eq=False)
class MegatronShard:
    """This rank's part of one parameter. If it is trained, each data-parallel rank steps a slice of it."""

    name: str  # Megatron's, on this stage
    parameter: Parameter
    tensor: Any  # the module's
    master: Any  # this rank's slice, in float32; in the tensor's memory if that is float32 too, or frozen
    counts: bool  # in the gradient norm; False if another tensor-parallel rank has the same
    slices: tuple[slice, ...]  # of the flat tensor, by data-parallel rank, perhaps empty; () if it is not divided
    rank: int  # this data-parallel rank

    @property
    def decays(self) -> bool:
        return bool(self.tensor.ndim >= 2)

    @property
    def shares_memory(self) -> bool:
        return bool(self.master.dtype == self.tensor.dtype)

    def own(self, whole: Any) -> Any:
        """Return this rank's flat slice of a tensor of the same size; all of it if it is not divided."""
        return whole.reshape(-1)[self.slices[self.rank]] if self.slices else whole

    @torch.no_grad()
    def refresh(self, locate: Locate = torch.Tensor.detach) -> None:
        """Copy the master to its slice of the tensor."""
        if not self.shares_memory:
            self.own(locate(self.tensor)).copy_(locate(self.master))

    @torch.no_grad()
    def write(self, whole: Any, locate: Locate = torch.Tensor.detach) -> None:
        """Copy new values to the tensor and the master."""
        locate(self.tensor).copy_(whole)
        if not self.shares_memory:
            locate(self.master).copy_(self.own(whole))

    def whole(self, own: Any, group: Any) -> Any:
        """Gather all ranks' slices as one tensor. A collective of the data-parallel ranks."""
        if not self.slices:
            return own
        whole = own.new_empty(self.tensor.numel())
        for rank, at in enumerate(self.slices):
            if at.start < at.stop:
                if rank == self.rank:
                    whole[at] = own
                dist.broadcast(whole[at], group=group, group_src=rank)
        return whole.view(self.tensor.shape)


class MegatronShards:
    """All parameters of a module on this rank."""

    def __init__(self, module: Any, shape: TransformerShape, stage: Stage, trained: Any = None) -> None:
        """List the shards; ``trained`` is Megatron's data parallelism of the module, unless it is frozen."""
        self._shape, self._stage = shape, stage
        self._table = list_parameters(shape)
        named, slices = dict(module.named_parameters()), {} if trained is None else _divide(trained, stage)
        self._own: dict[int, MegatronShard] = {}
        for index, parameter in enumerate(self._table):
            if parameter.stage(shape, stage.layout.pipeline) == stage.place.pipeline:
                name = parameter.local_name(shape, stage.layout.pipeline)
                self._own[index] = self._make_shard(name, parameter, named.pop(name), slices, counts=True)
        # The last stage has a copy of a tied embedding, under the head's name.
        self._copies = [self._make_shard(name, self._table[0], named[name], slices, counts=False) for name in named]

    def _make_shard(
        self, name: str, parameter: Parameter, tensor: Any, slices: Mapping[Any, tuple[slice, ...]], counts: bool
    ) -> MegatronShard:
        is_first = parameter.form != "whole" or self._stage.place.tensor == 0
        divided, rank = slices.get(tensor, ()), dist.get_rank(self._stage.data)
        shard = MegatronShard(name, parameter, tensor, None, counts and is_first, divided, rank)
        master = shard.own(tensor.detach())
        is_cast = tensor in slices and tensor.dtype != torch.float32
        shard.master = torch.nn.Parameter(torch.empty_like(master, dtype=torch.float32) if is_cast else master)
        return shard

    def __iter__(self) -> Iterator[MegatronShard]:
        yield from self._own.values()
        yield from self._copies

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the whole model, by name."""
        return dict(pair for item in self._table for pair in zip(item.sources, item.shapes, strict=True))

    @torch.no_grad()
    def part(self, shard: MegatronShard, tensors: list[Any]) -> Any:
        """Return this rank's part of whole Hugging Face tensors."""
        return split(shard.parameter, tensors, self._shape, self._stage.place.tensor, self._stage.layout.tensor)

    @torch.no_grad()
    def named_weights(
        self, read: Callable[[MegatronShard, Any], Any], device: str, dtype: Any = None
    ) -> Iterator[tuple[str, Any]]:
        """Yield Hugging Face's name and the whole tensor of each weight. A collective. ``read(shard, dtype)`` returns
        this rank's part on the device."""
        layout, dtype = self._stage.layout, dtype or next(iter(self)).master.dtype
        for index, item in enumerate(self._table):
            stage = item.stage(self._shape, layout.pipeline)
            if stage == self._stage.place.pipeline:
                part = read(self._own[index], dtype)
                is_split = item.form != "whole" and layout.tensor > 1
                tensors = join(item, gather_parts(part, self._stage.tensors) if is_split else [part], self._shape)
            else:
                tensors = [torch.empty(size, dtype=dtype, device=device) for size in item.shapes]
            for name, tensor in zip(item.sources, tensors, strict=True):
                yield name, self._stage.from_stage(tensor.contiguous(), stage)


def _divide(passes: Any, stage: Stage) -> dict[Any, tuple[slice, ...]]:
    """Divide each parameter as the data-parallel ranks divide its bucket of gradients."""
    ranks, slices = dist.get_world_size(stage.data), dict[Any, tuple[slice, ...]]()
    if ranks == 1:
        return dict.fromkeys((parameter for buffer in passes.buffers for parameter in buffer.params), ())
    for buffer in passes.buffers:
        for parameter, (start, stop, number) in buffer.param_index_map.items():
            bucket, size = buffer.buckets[number], stop - start
            share = bucket.grad_data.numel() // ranks
            bounds = [min(max(bucket.offset + share * rank - start, 0), size) for rank in range(ranks + 1)]
            slices[parameter] = tuple(map(slice, bounds, bounds[1:]))
    return slices


_DIVIDED: Mapping[Form, int] = {"vocab": 0, "columns": 1, "qkv": 0, "gate_up": 0}
"""The dimension of a parameter's tensors that the tensor-parallel ranks divide."""


class CheckpointTensors:
    """Copies of a rank's masters and moments in host memory, split into Hugging Face's tensors."""

    def __init__(
        self, shape: TransformerShape, stage: Stage, shards: MegatronShards, optimizer: MasterOptimizer | None
    ) -> None:
        self._shape, self._stage, ranks = shape, stage, stage.layout.tensor
        rows = pad_vocab(shape.vocab, ranks) // ranks
        self._local = dataclasses.replace(  # the numbers of this rank's part
            shape,
            heads=shape.heads // ranks,
            kv_heads=shape.kv_heads // ranks,
            intermediate=shape.intermediate // ranks,
            vocab=min(rows, shape.vocab - rows * stage.place.tensor),
        )
        self._shards, self._optimizer = shards, optimizer
        self._mesh = DeviceMesh.from_group(stage.tensors, "cpu") if stage.layout.tensor > 1 else None
        self.tensors: dict[str, Any] = {}
        for shard in shards:
            self._copy_parts(shard, shard.master.detach())
        if optimizer is None:
            return
        for shard, state in optimizer.state():
            for kind in ("exp_avg", "exp_avg_sq"):
                self._copy_parts(shard, optimizer.read(state, kind), kind)
            for source in shard.parameter.sources:
                self.tensors[stored_name(source, "step")] = state["step"].to("cpu", copy=True)

    def _copy_parts(self, shard: MegatronShard, own: Any, kind: str = "") -> None:
        item, tensor = shard.parameter, shard.whole(own, self._stage.data)
        for source, whole, part in zip(item.sources, item.shapes, join(item, [tensor], self._local), strict=True):
            copy = part.to("cpu", copy=True).contiguous()
            if self._mesh is not None and item.form != "whole":
                dimensions, stride = [Shard(_DIVIDED[item.form])], torch.empty(whole, device="meta").stride()
                shape = torch.Size(whole)
                copy = DTensor.from_local(copy, self._mesh, dimensions, run_check=False, shape=shape, stride=stride)
            self.tensors[stored_name(source, kind)] = copy

    def all_names(self) -> list[str]:
        """List the names of the whole model's tensors, other stages' too."""
        kinds = ("",) if self._optimizer is None else ("", "step", "exp_avg", "exp_avg_sq")
        return [stored_name(name, kind) for kind in kinds for name in self._shards.shapes()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy the tensors back into the masters and moments."""
        for shard in self._shards:
            shard.write(self._join_parts(shard))
        if self._optimizer is None:
            return
        for shard, state in self._optimizer.state():
            for kind in ("exp_avg", "exp_avg_sq"):
                self._optimizer.write(state, kind, shard.own(self._join_parts(shard, kind)))
            state["step"].copy_(self.tensors[stored_name(shard.parameter.sources[0], "step")])

    def _join_parts(self, shard: MegatronShard, kind: str = "") -> Any:
        tensors = [self.tensors[stored_name(source, kind)] for source in shard.parameter.sources]
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in tensors]
        joined = split(shard.parameter, parts, self._local, 0, 1)
        missing = len(shard.tensor) - len(joined)  # rows that pad the vocabulary
        return torch.cat([joined, joined.new_zeros(missing, *joined.shape[1:])]) if missing else joined
