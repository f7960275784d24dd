"""The ranks as process groups: who copies, who shards, who shares a sequence, who splits a matrix."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dlrover.python.rl.engine.layout import Layout, ParallelSizes
from dlrover.python.rl.engine.torch.ranks import Ranks


@dataclass(frozen=True, eq=False)
class Grid:
    """This rank's place among the others. Made by :meth:`of`, which every rank calls.

    Ranks that share a sequence shard the parameters between them too: the parameters are divided by
    ``shard * context`` ranks.

    Attributes:
        layout: sizes of the dimensions.
        place: this rank's coordinates.
        shards: mesh of the ranks that divide the parameters (ZeRO-3), or None.
        tensors: mesh of the ranks that split each matrix, or None.
        copies: process group of the ranks with the same part of each copy, or None.
        context: process group of the ranks that share a sequence, or None.
    """

    layout: Layout
    place: Layout
    shards: Any = None
    tensors: Any = None
    copies: Any = None
    context: Any = None

    @classmethod
    def of(cls, ranks: Ranks, sizes: ParallelSizes, device: str = "cpu") -> "Grid":
        """Divide the ranks.

        Raises:
            EngineError: the sizes do not divide the ranks, or ask for what this backend has not; gives the numbers.
        """
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
            ranks.bound(context)
        ranks.bound(*mesh.get_all_groups())
        return cls(
            layout,
            place,
            mesh["shard"] if shape[1] > 1 else None,
            mesh["tensor"] if shape[2] > 1 else None,
            mesh.get_group("copy") if shape[0] > 1 else None,
            context,
        )

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for its model replica, whose ranks all compute the same loss."""
        return self.place.context == 0 and self.place.tensor == 0

    @property
    def shard_size(self) -> int:
        """Ranks that divide the parameters."""
        return self.layout.shard * self.layout.context

    @property
    def shard_rank(self) -> int:
        """This rank among them."""
        return self.place.shard * self.layout.context + self.place.context


def gather_rows(local: Any, rows: int, group: Any) -> Any:
    """Put together a tensor whose first dimension the ranks of ``group`` divide, as ``torch.chunk`` does: the first of
    them have ``ceil(rows / ranks)`` each, and the last perhaps fewer, or none."""
    size = -(-rows // dist.get_world_size(group))
    padded = local.new_zeros((size, *local.shape[1:]))
    padded[: len(local)] = local
    whole = local.new_empty((size * dist.get_world_size(group), *local.shape[1:]))
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[:rows]
