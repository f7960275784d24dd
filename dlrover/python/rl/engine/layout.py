"""How the ranks of one train engine divide a model and its batch: integer arithmetic, and its refusals."""

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from dlrover.python.rl.common.errors import EngineError

Size = Annotated[int, Gt(0)]


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the dimensions of parallelism. The ranks that are left over shard the parameters (ZeRO-3)."""

    ddp_size: Size = 1
    """Copies of the sharded model, which stay bitwise equal (hybrid sharding)."""

    tensor_parallel_size: Size = 1
    """Ranks that split each matrix."""

    context_parallel_size: Size = 1
    """Ranks that split each sequence."""

    pipeline_parallel_size: Size = 1
    """Ranks that split the layers (megatron only)."""

    @property
    def replica_size(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class Layout:
    """The ranks as a grid, the last dimension running fastest: ``ddp x shard x pipeline x context x tensor``.

    So consecutive ranks form a model replica, as
    :meth:`~dlrover.python.rl.trainer.workload.BaseWorkload.data_parallel_size` wants it.
    """

    ddp: int = 1
    shard: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, world_size: int, sizes: ParallelSizes) -> "Layout":
        """Divide ``world_size`` ranks.

        Raises:
            EngineError: the product of the sizes does not divide the ranks; gives the numbers.
        """
        given = {
            "ddp_size": sizes.ddp_size,
            "pipeline_parallel_size": sizes.pipeline_parallel_size,
            "context_parallel_size": sizes.context_parallel_size,
            "tensor_parallel_size": sizes.tensor_parallel_size,
        }
        product = math.prod(given.values())
        if world_size % product:
            told = " x ".join(f"{name} {size}" for name, size in given.items() if size > 1)
            raise EngineError(f"{world_size} ranks cannot be divided by {told} = {product}")
        return cls(sizes.ddp_size, world_size // product, *list(given.values())[1:])

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Sizes, slowest dimension first."""
        return self.ddp, self.shard, self.pipeline, self.context, self.tensor

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.shape)

    @property
    def data_parallel_size(self) -> int:
        """Model replicas, each with rows of its own."""
        return self.ddp * self.shard

    def coordinates(self, rank: int) -> "Layout":
        """Where ``rank`` is in the grid, 0 to size - 1 in each dimension."""
        found = []
        for size in reversed(self.shape):
            rank, at = divmod(rank, size)
            found.append(at)
        return Layout(*reversed(found))
