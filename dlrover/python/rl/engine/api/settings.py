# SPDX-License-Identifier: Apache-2.0
"""The sections of a job's settings that all train engines share: how ranks divide the work, and the optimizer."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt

from dlrover.python.rl.common.errors import EngineError

Size = Annotated[int, Gt(0)]


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the dimensions of parallelism. The remaining ranks shard the parameters (ZeRO-3)."""

    ddp_size: Size = 1
    """Replicas of the sharded model, bitwise equal (hybrid sharding)."""

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

    Consecutive ranks form a model replica, as ``BaseWorkload.data_parallel_size`` requires."""

    ddp: int = 1
    shard: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, world_size: int, sizes: ParallelSizes) -> "Layout":
        """Divide ``world_size`` ranks. Raises an ``EngineError`` if the sizes do not divide them."""
        pipeline, context, tensor = (
            sizes.pipeline_parallel_size,
            sizes.context_parallel_size,
            sizes.tensor_parallel_size,
        )
        product = sizes.ddp_size * pipeline * context * tensor
        if world_size % product:
            factors = " x ".join(f"{name} {size}" for name, size in asdict(sizes).items() if size > 1)
            raise EngineError(f"{world_size} ranks cannot be divided by {factors} = {product}")
        return cls(sizes.ddp_size, world_size // product, pipeline, context, tensor)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.ddp, self.shard, self.pipeline, self.context, self.tensor

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    @property
    def data_parallel_size(self) -> int:
        """Model replicas, each with different rows."""
        return self.ddp * self.shard

    def coordinates(self, rank: int) -> "Layout":
        """Return the position of ``rank`` in the grid, 0 to size - 1 in each dimension."""
        return Layout(*map(int, np.unravel_index(rank, self.shape)))


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule with linear warm-up, and gradient clipping."""

    lr: Annotated[float, Gt(0.0), Lt(math.inf)] = 1e-6
    """Peak learning rate."""

    warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps over which the learning rate rises linearly from ``lr / warmup_steps`` to ``lr``."""

    weight_decay: Annotated[float, Ge(0.0)] = 0.0
    """Decoupled weight decay, not applied to vectors (norms, biases)."""

    betas: tuple[Annotated[float, Ge(0.0), Lt(1.0)], Annotated[float, Ge(0.0), Lt(1.0)]] = (0.9, 0.999)
    """Decay rates of the two moments of AdamW."""

    max_grad_norm: Annotated[float, Gt(0.0)] | None = 1.0
    """Maximum global gradient norm; None: no clipping."""

    name: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """``adamw_8bit`` is AdamW with the moments of matrices in 8 bits (arXiv:2110.02861), with the extra
    ``bitsandbytes``; ``sgd`` is plain gradient descent, with optional ``momentum``."""

    momentum: Annotated[float, Ge(0.0), Lt(1.0)] = 0.0
    """Momentum of ``sgd``."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate from ``lr`` to ``min_lr`` between the warm-up and ``decay_steps``."""

    min_lr: Annotated[float, Ge(0.0)] = 0.0
    """Learning rate at the end of the decay."""

    decay_steps: Annotated[int, Gt(0)] | None = None
    """Optimizer steps at which the decay ends, warm-up included. None: the steps of the run."""

    skip_nonfinite: Annotated[int, Ge(0)] = 0
    """Maximum consecutive updates that all ranks skip because the loss or gradient norm is not finite; the next one
    raises an error. 0: the first one does."""

    def __post_init__(self) -> None:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"only sgd has momentum; {self.name} has betas")
        if self.betas != (0.9, 0.999) and self.name == "sgd":
            raise ValueError(f"only adamw has betas; {self.name} has momentum")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr:g}) is above lr ({self.lr:g})")
        if self.schedule == "constant" and (self.min_lr or self.decay_steps is not None):
            raise ValueError("min_lr and decay_steps need a schedule that decays: linear or cosine")

    def over(self, steps: int) -> "OptimizerConfig":
        """Return the configuration with ``decay_steps`` set, if the schedule needs it and it is not."""
        is_set = self.schedule == "constant" or self.decay_steps is not None
        return self if is_set else replace(self, decay_steps=steps)
