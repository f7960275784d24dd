"""Gradients of a user's module: weighted on the way, and added up over the ranks that FSDP does not reach."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from dlrover.python.rl.engine.fsdp2.shards import Shards
from dlrover.python.rl.engine.module import Share

Around: TypeAlias = Callable[[Callable[[], None]], None]
"""Runs the backward pass that it is given, and what belongs before and after it."""


@contextmanager
def backward_by(weight: float, around: Around | None = None) -> Iterator[None]:
    """Inside, ``loss.backward()`` gives ``weight`` times the gradient.

    Args:
        weight: of this rank among all that add up.
        around: see :data:`Around`.
    """
    plain = torch.Tensor.backward

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        weighted = loss if weight == 1.0 else loss * weight
        if around is None:
            plain(weighted, *args, **kwargs)
        else:
            around(lambda: plain(weighted, *args, **kwargs))

    torch.Tensor.backward = backward
    try:
        yield
    finally:
        torch.Tensor.backward = plain


def settling(shards: Shards) -> Around:
    """Adds up each backward pass's gradients over copies of the model and ranks that split its matrices, so that
    ``.grad`` holds what all of them found; what earlier passes left there stays."""

    def around(backward: Callable[[], None]) -> None:
        trained = shards.trained
        earlier = [shard.parameter.grad for shard in trained]
        for shard in trained:
            shard.parameter.grad = None
        backward()
        shards.take_gradients()
        for shard, before in zip(trained, earlier, strict=True):
            if shard.master is not shard.parameter:
                shard.parameter.grad, shard.master.grad = shard.as_dtensor(shard.master.grad), None
            if before is not None:
                shard.parameter.grad += before

    return around


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
