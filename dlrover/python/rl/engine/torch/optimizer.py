"""The optimizer over this rank's float32 masters: plain tensors, whatever the layout."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from dlrover.python.rl.engine.base import OptimizerConfig
from dlrover.python.rl.engine.torch.stepping import clip_factor, learning_rate


class Shard(Protocol):
    """This rank's part of one parameter."""

    @property
    def master(self) -> Any:
        """Float32, with its gradient in ``grad`` when a step is taken."""
        ...

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: not to vectors."""
        ...

    def refresh(self) -> None:
        """Let the module compute with what the master holds now."""
        ...


S = TypeVar("S", bound=Shard)

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class MasterOptimizer(Generic[S]):
    """Steps the masters of the trained shards. Its state is there from the start: zeros.

    Args:
        config: which, its rate, decay and clipping.
        shards: those that are trained.
    """

    def __init__(self, config: OptimizerConfig, shards: Sequence[S]) -> None:
        self._config, self._shards = config, list(shards)
        groups = [
            {"params": [shard.master for shard in self._shards if shard.decays], "weight_decay": config.weight_decay},
            {"params": [shard.master for shard in self._shards if not shard.decays], "weight_decay": 0.0},
        ]
        self._inner = _made(config, [group for group in groups if group["params"]])
        for shard in self._shards:
            kinds = _MOMENTS[config.name] if config.name == "adamw" or config.momentum else ()
            state = {kind: torch.zeros_like(shard.master, requires_grad=False) for kind in kinds}
            if config.name == "adamw":
                state["step"] = torch.zeros((), device=shard.master.device)
            self._inner.state[shard.master] = state

    def step(self, version: int, norm: float) -> float:
        """Clip the masters' gradients, whose norm is ``norm``, and take the step after ``version``; return its rate."""
        factor = clip_factor(norm, self._config.max_grad_norm)
        if factor < 1.0:
            torch._foreach_mul_([shard.master.grad for shard in self._shards], factor)
        lr = learning_rate(self._config, version)
        with torch.no_grad():
            for group in self._inner.param_groups:
                group["lr"] = lr
                if group["shrinks"]:
                    torch._foreach_mul_(group["params"], 1 - lr * self._config.weight_decay)
        self._inner.step()
        with torch.no_grad():
            for shard in self._shards:
                shard.refresh()
        return lr

    def state(self) -> Iterator[tuple[S, Mapping[str, Any]]]:
        """Of each trained shard ``step``, ``exp_avg`` and ``exp_avg_sq``, or ``momentum_buffer``: the live tensors."""
        return ((shard, self._inner.state[shard.master]) for shard in self._shards)

    def tensors(self) -> list[Any]:
        """All of them."""
        return [tensor for _, state in self.state() for tensor in state.values()]


def _made(config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.name == "sgd":
        # Its own decay goes through the gradient and the momentum; this one is decoupled, as AdamW's is.
        told = [{**group, "weight_decay": 0.0, "shrinks": group["weight_decay"] > 0} for group in groups]
        return torch.optim.SGD(told, lr=config.lr, momentum=config.momentum, fused=True)
    told = [{**group, "shrinks": False} for group in groups]
    return torch.optim.AdamW(told, lr=config.lr, betas=config.betas, fused=True)
