"""How a train engine changes its weights."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and gradient-norm clipping."""

    lr: Annotated[float, Gt(0.0)] = 1e-6
    """Peak learning rate."""

    warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps over which the rate rises linearly from ``lr / warmup_steps`` to ``lr``."""

    weight_decay: Annotated[float, Ge(0.0)] = 0.0
    """Decoupled weight decay, not applied to vectors (norms, biases)."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""

    max_grad_norm: Annotated[float, Gt(0.0)] | None = 1.0
    """Global gradient norm to clip to; None turns clipping off."""
