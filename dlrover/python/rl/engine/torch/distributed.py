"""Data parallelism between processes: sums over the ranks, and nothing else."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlrover.python.rl.common.errors import EngineError

BUCKET_ELEMENTS = 1 << 24
"""Elements of one gradient all-reduce: large enough to hide latency, small enough not to double a model's memory."""


@dataclass(frozen=True)
class RankGroup:
    """The data-parallel ranks of one engine. Made by :meth:`connect`, which every rank calls; ended by :meth:`close`.

    A group of one rank needs no connection: its sums are the values themselves.
    """

    rank: int
    world_size: int

    @classmethod
    def connect(
        cls, rank: int, world_size: int, master_addr: str, master_port: int, timeout_s: float = 300.0
    ) -> "RankGroup":
        """Meet the other ranks at rank 0's address.

        Args:
            rank: this process, 0 to ``world_size - 1``.
            world_size: processes in all.
            master_addr: host of rank 0.
            master_port: a free port there.
            timeout_s: how long to wait for the others, here and in every sum, before giving up.

        Raises:
            EngineError: the ranks did not meet in time.
        """
        if world_size > 1:
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"tcp://{master_addr}:{master_port}",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout_s),
                )
            except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
                raise EngineError(
                    f"rank {rank} of {world_size} did not meet the others at {master_addr}:{master_port}: {error}"
                ) from error
        return cls(rank, world_size)

    def sum_tensors(self, tensors: Iterable[Any]) -> None:
        """Replace each float32 tensor by its sum over the ranks, in place. All ranks pass the same shapes in order."""
        if self.world_size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).cpu()
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def sum_scalars(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Sum by name over the ranks. A rank may lack a name: a shard without action tokens has no metrics."""
        if self.world_size == 1:
            return dict(scalars)
        gathered: list[dict[str, float]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(gathered, dict(scalars))
        totals: dict[str, float] = {}
        for part in gathered:
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def close(self) -> None:
        """Leave the group; the other ranks' later sums fail."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


ALONE = RankGroup(0, 1)
"""The group of a process that trains by itself."""


def _buckets(tensors: Iterable[Any]) -> Iterable[list[Any]]:
    bucket: list[Any] = []
    elements = 0
    for tensor in tensors:
        if bucket and elements + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
    if bucket:
        yield bucket
