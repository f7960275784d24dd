"""Gradients of a user's module: weighted on the way, and added up over the ranks that FSDP does not reach.

::

    any backward pass --> a layer's gradients, before FSDP adds them up  --,
                      '-> a plain parameter's                            --+--> times the weight --> .grad
    the pass is over  --> .grad added up over copies of the model and ranks that split its matrices
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from dlrover.python.rl.engine.fsdp2.shards import Shards
from dlrover.python.rl.engine.module import Share


class Gradients:
    """Makes ``.grad`` of a module's parameters what all ranks have found, whatever starts the backward pass.

    What earlier passes left in ``.grad`` stays. All of it hangs on the module and its parameters, and goes with them.

    Args:
        module: divided between the ranks.
        shards: its parameters.

    Attributes:
        weight: what this rank's gradient counts in the sum over all.
    """

    def __init__(self, module: Any, shards: Shards) -> None:
        self.weight = 1.0
        self._shards = shards
        self._adds_up = shards.grid.tensors is not None or shards.grid.copies is not None
        self._earlier: list[Any] | None = None
        units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for unit in units:
            unit.set_custom_reduce_scatter(_WeightedSum(self))
        for shard in shards.trained if self._adds_up and not units else ():
            shard.parameter.register_hook(self._weighted)

    def begin(self) -> None:
        """Before the first gradient of a pass arrives: what is added up over ranks must not be so again."""
        if not self._adds_up or self._earlier is not None:
            return
        trained = self._shards.trained
        self._earlier = [shard.parameter.grad for shard in trained]
        for shard in trained:
            shard.parameter.grad = None
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # when the pass is over

    def forget(self) -> None:
        """Drop what a pass that has failed left; of one that is over nothing is to be dropped."""
        if self._earlier is not None:
            for shard, before in zip(self._shards.trained, self._earlier, strict=True):
                shard.parameter.grad = before
            self._earlier = None

    def _weighted(self, gradient: Any) -> Any:
        self.begin()
        return gradient if self.weight == 1.0 else gradient * self.weight

    def _end(self) -> None:
        self._shards.take_gradients()
        for shard, before in zip(self._shards.trained, self._earlier or (), strict=True):
            if shard.master is not shard.parameter:
                shard.parameter.grad, shard.master.grad = shard.as_dtensor(shard.master.grad), None
            if before is not None:
                shard.parameter.grad += before
        self._earlier = None


class _WeightedSum:
    """FSDP's way to add up the gradients of a layer, each rank's by its weight."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        """Memory for one of the two tensors."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self._gradients.begin()
        if self._gradients.weight != 1.0:
            input_tensor.mul_(self._gradients.weight)
        return dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


def weight_of(combine: str, share: Share, replicas: int, context: int = 1) -> float:
    """What a rank's gradient counts in the sum over all.

    Args:
        combine: ``"mean"``: the rank's loss is the mean over its rows (or over its part of their sequences), and that
            over all rows is wanted. ``"sum"``: the losses add up.
        share: what the rank has of the call's rows.
        replicas: of the model.
        context: ranks of a replica that share sequences. Where a call does not divide these, all have the same loss.
    """
    alike = 1 if share.sequences and combine == "sum" else context
    if not share.of:
        return 1.0 / (replicas * alike)
    if combine == "sum":
        return 1.0 / alike if share.rows else 0.0
    return share.rows / (share.of * alike)
