"""The processes of one engine: meeting, small sums, leaving."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.base import Rendezvous

BUCKET_ELEMENTS = 1 << 24
"""Elements of one gradient all-reduce: large enough to hide latency, small enough not to double a model's memory."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine. Made by :meth:`connect`, which every rank calls; ended by :meth:`close`.

    A single rank needs no connection: its sums are the values themselves.

    Attributes:
        rank: this process, 0 to ``world_size - 1``.
        world_size: processes in all.
        owns_group: whether the process group was made here, and is ended here.
        timeout_s: how long a collective may wait.
    """

    rank: int = 0
    world_size: int = 1
    owns_group: bool = False
    timeout_s: float = 300.0

    @classmethod
    def connect(cls, rendezvous: Rendezvous, device: str = "cpu", always: bool = False) -> "Ranks":
        """Meet the other ranks at rank 0's address, as this process's default process group.

        A default group of the same shape that is there already (``torchrun``) is used, and not ended by :meth:`close`.

        Args:
            rendezvous: who and where.
            device: what the tensors to be exchanged are on: gloo for the host, beside it nccl for CUDA.
            always: make a process group for a single rank too, which some backends cannot do without.

        Raises:
            EngineError: the ranks did not meet in time, or this process belongs to a group of another shape.
        """
        rank, world_size = rendezvous.rank, rendezvous.world_size
        if world_size == 1 and not always:
            return cls()
        if dist.is_initialized():
            there = (dist.get_rank(), dist.get_world_size())
            if there != (rank, world_size):
                raise EngineError(f"this process is rank {there[0]} of {there[1]} already, not {rank} of {world_size}")
            return cls(rank, world_size, timeout_s=rendezvous.timeout_s)
        address = f"{rendezvous.master_addr}:{rendezvous.master_port}"
        where = {"store": dist.HashStore()} if world_size == 1 else {"init_method": f"tcp://{address}"}
        on_cuda = torch.device(device).type == "cuda"
        if on_cuda:
            torch.cuda.set_device(numbered(device))
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
                **where,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=rendezvous.timeout_s),
            )
        except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
            raise EngineError(f"rank {rank} of {world_size} did not meet the others at {address}: {error}") from error
        return cls(rank, world_size, owns_group=True, timeout_s=rendezvous.timeout_s)

    def bound(self, *groups: Any) -> None:
        """Let collectives of other process groups wait no longer than those of the default one: by themselves they
        would for half an hour."""
        for group in groups:
            _set_pg_timeout(timedelta(seconds=self.timeout_s), group)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, which has to be picklable, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def sum_scalars(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Sum by name over the ranks, in their order. A rank may lack a name: without action tokens it has no metrics,
        and of the ranks of a model replica one speaks for all."""
        totals: dict[str, float] = {}
        for part in self.gather(dict(scalars)):
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def agree(self, fault: str) -> None:
        """Go on together or not at all.

        Args:
            fault: what has gone wrong on this rank; empty if nothing has.

        Raises:
            EngineError: something has gone wrong on some rank; all of them say so.
        """
        if told := told_by_ranks(self.gather(fault)):
            raise EngineError(told)

    @contextmanager
    def left_on_failure(self) -> Iterator[None]:
        """Leave the group if the block fails: another engine can then meet the ranks."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group; the other ranks' later sums fail."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def numbered(device: str) -> str:
    """``device`` by its number: ``"cuda"`` is the process's current one."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def told_by_ranks(faults: Sequence[str]) -> str:
    """The faults of all ranks in one line, each with its rank where there are several; empty if there is none."""
    named = [f"rank {rank}: {fault}" if len(faults) > 1 else fault for rank, fault in enumerate(faults) if fault]
    return "; ".join(named)


def sum_tensors(tensors: Iterable[Any], group: Any) -> None:
    """Replace each tensor by its sum over the ranks of a process group, in place; all pass the same shapes in order.

    Every rank gets the same bits.
    """
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Any]) -> Iterator[list[Any]]:
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
