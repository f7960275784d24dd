"""How a train engine changes its weights."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer with linear warm-up, a schedule, and gradient-norm clipping."""

    lr: Annotated[float, Gt(0.0)] = 1e-6
    """Peak learning rate."""

    warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps over which the rate rises linearly from ``lr / warmup_steps`` to ``lr``."""

    weight_decay: Annotated[float, Ge(0.0)] = 0.0
    """Decoupled weight decay, not applied to vectors (norms, biases)."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""

    max_grad_norm: Annotated[float, Gt(0.0)] | None = 1.0
    """Global gradient norm to clip to; None turns clipping off."""

    name: Literal["adamw", "sgd"] = "adamw"
    """``sgd`` is plain gradient descent, with ``momentum`` where that is above 0."""

    momentum: Annotated[float, Ge(0.0), Lt(1.0)] = 0.0
    """Of ``sgd``."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes from ``lr`` to ``min_lr`` between the warm-up and ``decay_steps``."""

    min_lr: Annotated[float, Ge(0.0)] = 0.0
    """The rate at the end of a schedule that falls."""

    decay_steps: Annotated[int, Gt(0)] | None = None
    """Optimizer steps after which a falling schedule is at its end, warm-up included. None: those of the whole run."""

    def __post_init__(self) -> None:
        if self.momentum and self.name != "sgd":
            raise ValueError(f"momentum is of sgd; {self.name} has betas")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr:g}) is above lr ({self.lr:g})")

    def over(self, steps: int) -> "OptimizerConfig":
        """The same for a run of so many optimizer steps."""
        return self if self.decay_steps is not None else replace(self, decay_steps=steps)
