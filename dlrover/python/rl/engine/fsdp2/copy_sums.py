# SPDX-License-Identifier: Apache-2.0
"""Gradients summed over the copies of a model while the backward pass still makes others.

::

    last backward pass of a step --> a part's gradients are there --> its sum over the copies begins --,
    the pass is over             --> the sums of what it did not reach begin ------------------------- +--> waited for
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.fsdp2.shards import ParameterShard, to_local_tensor

LARGE = 1 << 18
"""Elements of a gradient that is summed where it is; smaller ones are joined up to as many, since each sum has a
latency."""

T = TypeVar("T")


class CopySums:
    """Parts are summed in one order, that of a backward pass, on every rank, whichever gradients come first. A step
    sums all of them, also if it fails on some ranks: the sums of the next one would meet what is left of this one."""

    def __init__(self, shards: Sequence[ParameterShard], group: Any) -> None:
        self._group = group
        self._parts = list(_join_small(shard for shard in reversed(shards) if not shard.summed))
        if summed := [shard for shard in shards if shard.summed]:  # over tensor-parallel ranks first, after the pass
            self._parts.append(summed)
        self._reset()
        for index, part in enumerate(self._parts):
            for shard in part if not part[0].summed else ():
                shard.parameter.register_post_accumulate_grad_hook(partial(self._take, shard, index))

    def begin_at_last(self, micros: Sequence[T]) -> Iterator[T]:
        """The micro-batches of a step: the backward pass of the last one completes the gradients."""
        self._is_stepping = True
        for number, micro in enumerate(micros, start=1):
            self._is_last_pass = number == len(micros)
            yield micro

    def finish(self) -> None:
        """The gradients of all shards, each of which has one by now, are sums over the copies."""
        self._is_last_pass = False
        while len(self._begun) < len(self._parts):
            self._begin_next()
        for begun in self._begun:
            begun.finish()
        self._reset()

    def forget(self) -> None:
        """The step that has begun, if any, has failed: let the other ranks' sums end."""
        begun, is_stepping = self._begun, self._is_stepping
        rest = self._parts[len(begun) :] if is_stepping else []
        self._reset()
        works = [each.work for each in begun] + [self._sum_zeros(part) for part in rest]
        for work in works:
            work.wait()  # waits: for the process group's timeout

    def _sum_zeros(self, part: Sequence[ParameterShard]) -> Any:
        local = to_local_tensor(part[0].parameter)
        zeros = local.new_zeros(sum(shard.master.numel() for shard in part), dtype=part[0].master.dtype)
        return dist.all_reduce(zeros, group=self._group, async_op=True)

    def _reset(self) -> None:
        self._is_stepping = self._is_last_pass = False
        self._begun: list[_Sum] = []
        self._missing = [{shard.name for shard in part} for part in self._parts]

    def _take(self, shard: ParameterShard, index: int, _parameter: Any) -> None:
        if not self._is_last_pass:
            return
        if shard.name not in self._missing[index]:
            raise EngineError(f"one backward pass gave '{shard.name}' two gradients: copies of it cannot be summed")
        shard.take_gradient()
        self._missing[index].remove(shard.name)
        while len(self._begun) < len(self._parts) and not self._missing[len(self._begun)]:
            self._begin_next()

    def _begin_next(self) -> None:
        part = self._parts[len(self._begun)]
        self._begun.append(_Sum([shard.gradient for shard in part], self._group))


class _Sum:
    """Of one part, under way. One gradient is summed in place."""

    def __init__(self, gradients: list[Any], group: Any) -> None:
        self._gradients = gradients
        joined = len(gradients) > 1 or not gradients[0].is_contiguous()
        self._flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) if joined else gradients[0]
        self.work = dist.all_reduce(self._flat, group=group, async_op=True)

    def finish(self) -> None:
        self.work.wait()  # waits: for the process group's timeout
        if self._flat is self._gradients[0]:
            return
        if self._flat.is_cuda:  # FSDP may have begun the sum on a stream of its own
            self._flat.record_stream(torch.cuda.current_stream())
        parts = self._flat.split([gradient.numel() for gradient in self._gradients])
        for gradient, part in zip(self._gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _join_small(shards: Iterable[ParameterShard]) -> Iterator[list[ParameterShard]]:
    small: list[ParameterShard] = []
    elements = 0
    for shard in shards:
        size = shard.master.numel()
        if size >= LARGE:
            yield [shard]
            continue
        small.append(shard)
        elements += size
        if elements >= LARGE:
            yield small
            small, elements = [], 0
    if small:
        yield small
