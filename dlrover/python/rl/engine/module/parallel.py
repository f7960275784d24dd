# SPDX-License-Identifier: Apache-2.0
"""Parallelism of users' modules: shared sequences (context parallel), and gradients, which are weighted and summed over
the ranks that FSDP does not cover.

::

    backward pass   --> a layer's gradients, before FSDP sums them  --,
                    '-> a plain parameter's gradient                --+--> times the weight --> .grad
    end of the pass --> .grad summed over copies of the model and ranks that split its matrices
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.fsdp2.shards import Grid, Shards
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.ranks import reduce_scatter_single
from dlrover.python.rl.engine.model.train_module import CallShare


class Gradients:
    """Makes ``.grad`` of a module's parameters the sum over all ranks, whatever starts the backward pass.

    Earlier values of ``.grad`` stay. ``weight`` is this rank's factor in the sum. FSDP calls this object to sum a
    layer's gradients."""

    def __init__(self, module: Any, shards: Shards, sequences: "SharedSequences | None") -> None:
        self._sequences, self.weight = sequences, 1.0
        self._shards = shards
        self._sums = shards.grid.tensors is not None or shards.grid.copies is not None
        self._earlier: list[Any] | None = None
        units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for unit in units:
            unit.set_custom_reduce_scatter(self)
        for shard in shards.trained if self._sums and not units else ():
            shard.parameter.register_hook(self._apply_weight)

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self._begin()
        if self.weight != 1.0:
            input_tensor.mul_(self.weight)
        return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)

    def _apply_weight(self, gradient: Any) -> Any:
        self._begin()
        return gradient if self.weight == 1.0 else gradient * self.weight

    def _begin(self) -> None:
        """Save the earlier gradients, which are summed already, before the first gradient of a pass arrives."""
        if not self._sums or self._earlier is not None:
            return
        trained = self._shards.trained
        self._earlier = [shard.parameter.grad for shard in trained]
        for shard in trained:
            shard.parameter.grad = None
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # when the pass is over

    @contextmanager
    def calling(self, combine: str, share: CallShare) -> Iterator[None]:
        """Weight the gradients of a call, see :func:`compute_gradient_weight`, and drop them if a pass fails."""
        layout, sequences = self._shards.grid.layout, self._sequences
        self.weight = compute_gradient_weight(combine, share, layout.data_parallel_size, layout.context)
        try:
            with nullcontext() if sequences is None else sequences.divided(share.sequences):
                yield
        finally:
            if self._earlier is not None:
                for shard, before in zip(self._shards.trained, self._earlier, strict=True):
                    shard.parameter.grad = before
                self._earlier = None

    def _end(self) -> None:
        self._shards.take_gradients()
        for shard, before in zip(self._shards.trained, self._earlier or (), strict=True):
            if shard.master is not shard.parameter:
                shard.parameter.grad, shard.gradient = shard.as_dtensor(shard.gradient), None
            if before is not None:
                shard.parameter.grad += before
        self._earlier = None


def compute_gradient_weight(combine: str, share: CallShare, replicas: int, context: int = 1) -> float:
    """Return the factor of a rank's gradient in the sum over all.

    Args:
        combine: ``"mean"``: each rank's loss is the mean over its rows (or its part of their sequences), and the result
            the mean over all rows. ``"sum"``: the losses add up.
        share: this rank's part of the call's rows.
        replicas: number of model replicas.
        context: ranks of a replica that share sequences; they have the same loss if a call does not divide sequences.
    """
    alike = 1 if share.sequences and combine == "sum" else context
    if not share.of:
        return 1.0 / (replicas * alike)
    if combine == "sum":
        return 1.0 / alike if share.rows else 0.0
    return share.rows / (share.of * alike)


class SharedSequences:
    """Tells a Hugging Face model, in each forward pass, its rank's part of the sequences.

    Inside :meth:`divided` the ranks' inputs ``[rows, tokens]`` are consecutive parts of the same sequences; else each
    rank has whole sequences."""

    def __init__(self, module: Any, grid: Grid) -> None:
        if not hasattr(module, "set_attn_implementation"):
            name = type(module).__name__
            raise EngineError(f"{name} is not a Hugging Face model: context_parallel_size must be 1")
        attention.check_context_parallel(module, grid.layout.context, grid.layout.tensor)
        module.set_attn_implementation(attention.NAME)
        module.register_forward_pre_hook(self._add_documents, with_kwargs=True)
        self._group = grid.context
        self._divided = False

    @contextmanager
    def divided(self, divided: bool) -> Iterator[None]:
        self._divided = divided
        try:
            yield
        finally:
            self._divided = False

    def _add_documents(
        self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any]:
        named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
        inputs = next((value for value in (*args[:1], *named) if value is not None), None)
        if inputs is None:
            raise EngineError("ranks that share sequences need input_ids or inputs_embeds")
        group = self._group if self._divided else None
        rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        rows, tokens = inputs.shape[:2]
        positions = torch.arange(rank * tokens, (rank + 1) * tokens, device=inputs.device)[None]
        defaults = {
            "documents": attention.Documents((ranks * tokens,) * rows, str(inputs.device), group),
            "position_ids": positions,
            "use_cache": False,
        }
        return args, defaults | {name: value for name, value in kwargs.items() if value is not None}
