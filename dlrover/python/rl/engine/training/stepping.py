# SPDX-License-Identifier: Apache-2.0
"""The parts of a step that all train engines share, and the optimizer of a rank's float32 master weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.common.spans import phase
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, TokenLoss
from dlrover.python.rl.engine.model.packing import MicroBatch, select_columns
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.training import eight_bit

Read: TypeAlias = Callable[[MicroBatch, bool], tuple[Any, ...]]
"""``read(micro, entropy) -> (outputs, entropies or None)``, each ``[actions]``, with gradient; with candidates the
outputs are ``[actions, 1 + n]``."""

_LOSS, _BAD = "\0loss", "\0bad "  # unlike any metric of a user's loss


def accumulate_gradients(
    micros: Iterable[MicroBatch],
    batch: Batch,
    loss: TokenLoss,
    read: Read,
    backward: Callable[[Any], None],
    device: str = "cpu",
) -> dict[str, float]:
    """Add this rank's gradients; returns its summed loss and metrics for :func:`check_loss`."""
    totals = {_LOSS: 0.0}
    wants_entropy = bool(getattr(loss, "wants_entropy", False))
    for micro in micros:
        note_progress()
        with phase("forward"):
            outputs, entropies = read(micro, wants_entropy)
        if not len(micro.flat):
            with phase("backward"):
                backward(outputs.sum() * 0.0)  # other ranks may have rows here, and all work in lockstep
            continue
        columns = select_columns(batch, micro.flat, device)
        if micro.candidates is not None:
            outputs, columns["candidate_logprobs"] = outputs[:, 0], outputs[:, 1:]
        if wants_entropy:
            columns["entropy"] = entropies
        value, metrics = loss(outputs, columns)
        sums = {_LOSS: value, **metrics}
        sums = {name: float(each.detach() if isinstance(each, torch.Tensor) else each) for name, each in sums.items()}
        if not math.isfinite(sums[_LOSS]):
            totals.setdefault(f"{_BAD}{find_nonfinite({'outputs': outputs, **columns})}", 1.0)
        with phase("backward"):
            backward(value)
        for name, amount in sums.items():
            totals[name] = totals.get(name, 0.0) + amount
    return totals


def check_loss(totals: dict[str, float], version: int) -> float:
    """Remove the loss from the summed totals and return it, or raise :class:`NonFiniteUpdate`."""
    value = totals.pop(_LOSS)
    bad = [name for name in totals if name.startswith(_BAD)]
    if not math.isfinite(value):
        origin = bad[0].removeprefix(_BAD) if bad else "the sum over the micro-batches"
        raise refuse_update(f"the loss is {value}", origin, version)
    return value


def refuse_update(event: str, origin: str, version: int) -> NonFiniteUpdate:
    """Make the error of an update that is not finite, first in the tensor ``origin``."""
    return NonFiniteUpdate(
        f"{event} (first in: {origin}): the update of version {version} is refused and the weights are unchanged"
    )


def find_nonfinite(tensors: Mapping[str, Any]) -> str:
    """Return the name of the first tensor with a NaN or an infinity."""
    bad = (name for name, tensor in tensors.items() if tensor is not None and not bool(tensor.isfinite().all()))
    return next(bad, "a sum of finite numbers")


def find_first_nonfinite(ranks: Ranks, gradients: Mapping[str, Any], order: Sequence[str]) -> str:
    """Call :func:`find_nonfinite` on all ranks; returns the first name in the ``order`` of the whole model's."""
    at = {name: index for index, name in enumerate(order)}
    return str(min(ranks.gather(find_nonfinite(gradients)), key=lambda name: at.get(name, len(at))))


def compute_learning_rate(config: OptimizerConfig, steps_taken: int) -> float:
    """Return the next step's rate. ``cosine`` is half a period (Loshchilov and Hutter, arXiv:1608.03983, eq. 5, without
    warm restarts). Raises an EngineError if the schedule lacks ``decay_steps``."""
    if steps_taken < config.warmup_steps:
        return config.lr * (steps_taken + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.decay_steps is None:
        raise EngineError(f"a {config.schedule} schedule needs decay_steps")
    progress = min((steps_taken - config.warmup_steps) / max(config.decay_steps - config.warmup_steps, 1), 1.0)
    factor = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * factor


_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class MasterOptimizer:
    """Steps the masters of the trained shards. Its state exists from the start, as zeros.

    A shard has a ``name``, a float32 ``master`` with its gradient in ``grad``, ``decays`` (vectors have no weight
    decay), and ``refresh()``, which copies the master to the module's parameter."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[Any]) -> None:
        self._config, self._shards = config, list(shards)
        groups = [
            {"params": [shard.master for shard in self._shards if shard.decays], "weight_decay": config.weight_decay},
            {"params": [shard.master for shard in self._shards if not shard.decays], "weight_decay": 0.0},
        ]
        self._inner = build_optimizer(config, groups)
        for shard in self._shards:
            self._inner.state[shard.master] = make_state(config, shard.master, of_matrices=shard.decays)

    def step(self, version: int, norm: float) -> float:
        """Clip the masters' gradients of norm ``norm`` and take the step after ``version``; returns the rate."""
        most = self._config.max_grad_norm
        if most is not None and norm > most:
            torch._foreach_mul_([shard.master.grad for shard in self._shards], most / (norm + 1e-6))
        lr = compute_learning_rate(self._config, version)
        with torch.no_grad():
            for group in self._inner.param_groups:
                group["lr"] = lr
                if group["decayed"]:
                    torch._foreach_mul_(group["params"], 1 - lr * self._config.weight_decay)
        self._inner.step()
        for shard in self._shards:
            shard.refresh()
        return lr

    def state(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        """Return each trained shard with its live tensors: ``step``, ``exp_avg`` and ``exp_avg_sq``, with scales if
        they are in 8 bits, or ``momentum_buffer``."""
        return ((shard, self._inner.state[shard.master]) for shard in self._shards)

    def moments(self, locate: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
        """Return :meth:`state` by name, with the memory that ``locate`` gives."""
        return {shard.name: {kind: locate(tensor) for kind, tensor in state.items()} for shard, state in self.state()}

    def tensors(self) -> list[Any]:
        return [tensor for _, state in self.state() for tensor in state.values()]

    def read(self, state: Mapping[str, Any], kind: str) -> Any:
        """Return a tensor of :meth:`state` in float32."""
        return self._inner.read(state, kind) if isinstance(self._inner, eight_bit.AdamW8bit) else state[kind]

    def write(self, state: Mapping[str, Any], kind: str, value: Any) -> None:
        if isinstance(self._inner, eight_bit.AdamW8bit):
            self._inner.write(state, kind, value)
        else:
            state[kind].copy_(value)


def make_state(config: OptimizerConfig, master: Any, of_matrices: bool) -> dict[str, Any]:
    """Make the state, zeros, of a parameter or of a flat part of several."""
    if config.name == "adamw_8bit":
        return eight_bit.make_state(master, of_matrices)
    kinds = _MOMENTS[config.name] if config.name == "adamw" or config.momentum else ()
    state = {kind: torch.zeros_like(master, requires_grad=False) for kind in kinds}
    if config.name == "adamw":
        state["step"] = torch.zeros((), device=master.device)
    return state


def build_optimizer(config: OptimizerConfig, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make the configured optimizer, without empty groups."""
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        # SGD's own decay goes through the gradient and the momentum; here it is decoupled, as AdamW's is.
        groups = [{**group, "weight_decay": 0.0, "decayed": group["weight_decay"] > 0} for group in groups]
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    groups = [{**group, "decayed": False} for group in groups]
    if config.name == "adamw_8bit":
        return eight_bit.AdamW8bit(groups, config.lr, config.betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
