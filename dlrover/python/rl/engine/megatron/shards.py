"""The parameters of Megatron's GPT as this rank has them: loaded, put together again, their gradients' norm."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlrover.python.rl.engine.layout import Layout
from dlrover.python.rl.engine.megatron.conversion import Parameter, join, parameters, split
from dlrover.python.rl.engine.megatron.shape import TransformerShape
from dlrover.python.rl.engine.torch.ranks import Ranks
from dlrover.python.rl.engine.torch.stepping import first_bad


@dataclass(frozen=True, eq=False)
class Stage:
    """This rank among those of its model replica.

    Attributes:
        layout: sizes of the dimensions.
        place: this rank's coordinates.
        tensors: process group of the ranks that split each matrix.
        pipeline: process group of the ranks that divide the layers.
    """

    layout: Layout
    place: Layout
    tensors: Any
    pipeline: Any

    @property
    def is_last(self) -> bool:
        """Whether outputs come from here."""
        return self.place.pipeline == self.layout.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for its model replica, whose last ranks all compute the same loss."""
        return self.is_last and self.place.tensor == 0

    def from_stage(self, tensor: Any, stage: int) -> Any:
        """Replace ``tensor`` by that of another pipeline stage, in place. A collective of all stages."""
        if self.layout.pipeline > 1:
            dist.broadcast(tensor, dist.get_process_group_ranks(self.pipeline)[stage], group=self.pipeline)
        return tensor


@dataclass(eq=False)
class MegatronShard:
    """This rank's part of one parameter.

    Attributes:
        name: Megatron's, on this stage.
        parameter: what it holds.
        tensor: the module's.
        master: float32; shares the tensor's memory, unless a trained one is computed with in lower precision.
        counts: whether its gradient counts in the norm: another rank may have the same.
    """

    name: str
    parameter: Parameter
    tensor: Any
    master: Any
    counts: bool

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: not to vectors."""
        return bool(self.tensor.ndim >= 2)

    def refresh(self) -> None:
        """Let the module compute with what the master holds now."""
        if self.master is not self.tensor:
            self.tensor.copy_(self.master)


class MegatronShards:
    """All parameters of a module on this rank.

    Args:
        module: Megatron's GPT, not wrapped.
        shape: of the model.
        stage: this rank.
        trained: whether they get masters.
    """

    def __init__(self, module: Any, shape: TransformerShape, stage: Stage, trained: bool) -> None:
        self._shape, self._stage = shape, stage
        self._table = parameters(shape)
        named = dict(module.named_parameters())
        self._own: dict[int, MegatronShard] = {}
        for index, parameter in enumerate(self._table):
            if parameter.stage(shape, stage.layout.pipeline) == stage.place.pipeline:
                name = parameter.local_name(shape, stage.layout.pipeline)
                self._own[index] = self._shard(name, parameter, named.pop(name), trained, counts=True)
        # Of a tied embedding the last stage has a copy, under the head's name.
        self._copies = [self._shard(name, self._table[0], named[name], trained, counts=False) for name in named]

    def _shard(self, name: str, parameter: Parameter, tensor: Any, trained: bool, counts: bool) -> MegatronShard:
        master = tensor
        if trained and tensor.dtype != torch.float32:
            master = torch.nn.Parameter(torch.empty_like(tensor, dtype=torch.float32))
        alone = parameter.form != "whole" or self._stage.place.tensor == 0
        return MegatronShard(name, parameter, tensor, master, counts and alone)

    def __iter__(self) -> Iterator[MegatronShard]:
        yield from self._own.values()
        yield from self._copies

    @property
    def trained(self) -> list[MegatronShard]:
        """Those that steps change: all."""
        return list(self)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every tensor of the whole model."""
        pairs = [pair for item in self._table for pair in zip(item.sources, item.shapes, strict=True)]
        return dict(pairs)

    @torch.no_grad()
    def part(self, shard: MegatronShard, tensors: list[Any]) -> Any:
        """This rank's part of whole Hugging Face tensors."""
        return split(shard.parameter, tensors, self._shape, self._stage.place.tensor, self._stage.layout.tensor)

    @torch.no_grad()
    def named_weights(self, local: Any, device: str) -> Iterator[tuple[str, Any]]:
        """Hugging Face's name and tensor of everything, whole on every rank. A collective where ranks divide it.

        Args:
            local: gives the values of a shard's master, on whatever device.
            device: where they go.
        """
        layout, dtype = self._stage.layout, next(iter(self)).master.dtype
        for index, item in enumerate(self._table):
            at = item.stage(self._shape, layout.pipeline)
            if at == self._stage.place.pipeline:
                tensors = join(item, self._gathered(item, local(self._own[index]).to(device)), self._shape)
            else:
                tensors = [torch.empty(size, dtype=dtype, device=device) for size in item.shapes]
            for name, tensor in zip(item.sources, tensors, strict=True):
                yield name, self._stage.from_stage(tensor.contiguous(), at)

    def _gathered(self, item: Parameter, mine: Any) -> list[Any]:
        if item.form == "whole" or self._stage.layout.tensor == 1:
            return [mine]
        parts = [torch.empty_like(mine) for _ in range(self._stage.layout.tensor)]
        dist.all_gather(parts, mine.contiguous(), group=self._stage.tensors)
        return parts

    # -- gradients ----------------------------------------------------------------------------------------------------

    def take_gradients(self) -> list[Any]:
        """Hand each master its gradient, which Megatron has summed in float32."""
        for shard in self:
            shard.master.grad = shard.tensor.main_grad
        return [shard.master.grad for shard in self]

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for shard in self:
            shard.master.grad = shard.tensor.grad = None

    def gradient_norm(self, ranks: Ranks) -> float:
        """Of the gradient of the whole model, to the same bit on every rank: the sums are taken in the ranks' order."""
        norms = [torch.linalg.vector_norm(shard.master.grad).double() for shard in self if shard.counts]
        squares = sum(float(norm * norm) for norm in norms)
        first = self._stage.place.ddp == 0 and self._stage.place.shard == 0
        return math.sqrt(sum(ranks.gather(squares if first else 0.0)))

    def first_bad_gradient(self, ranks: Ranks) -> str:
        """Hugging Face's name of the first parameter whose gradient is not finite on some rank."""
        order = {item.sources[0]: index for index, item in enumerate(self._table)}
        told = ranks.gather(first_bad({shard.parameter.sources[0]: shard.master.grad for shard in self}))
        return str(min(told, key=lambda name: order.get(name, len(order))))
