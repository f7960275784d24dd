# SPDX-License-Identifier: Apache-2.0
"""The parts of a step that all train engines share, the optimizer over a rank's float32 master weights, and backends
that step it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate, OtherLayout, WeightSyncError
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, TokenLoss
from dlrover.python.rl.engine.api.weights import describe_shape_mismatches
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks, join_rank_errors
from dlrover.python.rl.engine.training import eight_bit

Read: TypeAlias = Callable[[MicroBatch, bool], tuple[Any, ...]]
"""``read(micro, entropy) -> (outputs, entropies or None)``, each ``[actions]``, with gradient; with candidates the
outputs are ``[actions, 1 + n]``."""

_LOSS, _TOKENS, _BAD = "\0loss", "\0tokens", "\0bad "  # names that no metric of a user's loss has


def agree_on_micro_batches(
    ranks: Ranks, needs_actions: bool, cut: Callable[[int], list[MicroBatch]], check: Callable[[], None]
) -> list[MicroBatch]:
    """This rank's micro-batches, as many as every other rank has, so that all work in lockstep.

    ``cut(n)`` makes ``n`` or more, the last ones perhaps empty; ``check()`` raises if the batch does not fit the model.

    Raises:
        EngineError: the batch of some rank does not fit; on every rank, so that none waits for another.
    """
    micros, own_error = [], ""
    try:
        check()
        micros = cut(0)
    except EngineError as error:
        own_error = str(error)
    reports = ranks.gather((own_error, len(micros)))
    if message := join_rank_errors([error for error, _ in reports]):
        raise EngineError(message)
    most = max(count for _, count in reports)
    if needs_actions and not most:
        raise EngineError("no row of the batch has an action token")
    return micros if len(micros) == most else cut(most)


def accumulate_gradients(  # noqa: PLR0913 - the differences between engines are parameters
    micros: Iterable[MicroBatch],
    batch: Batch,
    loss: TokenLoss,
    read: Read,
    backward: Callable[[Any], None],
    device: str = "cpu",
) -> dict[str, float]:
    """Add this rank's gradients; returns its summed loss, token count and metrics for :func:`check_loss`."""
    totals = {_LOSS: 0.0, _TOKENS: 0.0}
    wants_entropy = bool(getattr(loss, "wants_entropy", False))
    for micro in micros:
        note_progress()
        outputs, entropies = read(micro, wants_entropy)
        if not len(micro.flat):
            backward(outputs.sum() * 0.0)  # The other ranks have a micro-batch with rows here, and work in step.
            continue
        columns = micro.columns(batch, device)
        if micro.candidates is not None:
            outputs, columns["candidate_logprobs"] = outputs[:, 0], outputs[:, 1:]
        if wants_entropy:
            columns["entropy"] = entropies
        value, metrics = loss(outputs, columns)
        if not math.isfinite(_to_float(value)):
            totals.setdefault(f"{_BAD}{find_nonfinite({'outputs': outputs, **columns})}", 1.0)
        backward(value)
        for name, amount in {_LOSS: value, _TOKENS: len(micro.flat), **metrics}.items():
            totals[name] = totals.get(name, 0.0) + _to_float(amount)
    return totals


def check_loss(totals: dict[str, float], version: int) -> float:
    """Remove loss and token count from the summed totals; returns the loss, or raises :class:`NonFiniteUpdate`."""
    value = totals.pop(_LOSS)
    totals.pop(_TOKENS)
    bad = [name for name in totals if name.startswith(_BAD)]
    if not math.isfinite(value):
        origin = bad[0].removeprefix(_BAD) if bad else "the sum over the micro-batches"
        raise _non_finite(f"the loss is {value}", origin, version)
    return value


def select_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """The loss's own metrics."""
    return {name: value for name, value in totals.items() if not name.startswith("\0")}


def check_gradient_norm(norm: float, first: Callable[[], str], version: int) -> None:
    """Raise :class:`NonFiniteUpdate` if the norm is not finite; ``first``, called on every rank, names the tensor."""
    if not math.isfinite(norm):
        raise _non_finite(f"the gradient norm is {norm}", first(), version)


def _non_finite(event: str, origin: str, version: int) -> NonFiniteUpdate:
    return NonFiniteUpdate(
        f"{event} (first in: {origin}): the update of version {version} is refused and the weights are unchanged"
    )


def find_nonfinite(tensors: Mapping[str, Any]) -> str:
    """Name of the first tensor that holds a NaN or an infinity."""
    bad = (name for name, tensor in tensors.items() if tensor is not None and not bool(tensor.isfinite().all()))
    return next(bad, "a sum of finite numbers")


def find_first_nonfinite(ranks: Ranks, gradients: Mapping[str, Any], order: Sequence[str]) -> str:
    """:func:`find_nonfinite` over all ranks: the first in the ``order`` of the whole model's names."""
    at = {name: index for index, name in enumerate(order)}
    return str(min(ranks.gather(find_nonfinite(gradients)), key=lambda name: at.get(name, len(at))))


def compute_learning_rate(config: OptimizerConfig, steps_taken: int) -> float:
    """Rate of the next step. ``cosine`` is half a period (Loshchilov and Hutter, arXiv:1608.03983, eq. 5, no restarts).

    Raises:
        EngineError: the schedule lacks ``decay_steps``.
    """
    if steps_taken < config.warmup_steps:
        return config.lr * (steps_taken + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.decay_steps is None:
        raise EngineError(f"a {config.schedule} schedule needs decay_steps")
    progress = min((steps_taken - config.warmup_steps) / max(config.decay_steps - config.warmup_steps, 1), 1.0)
    factor = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * factor


def _to_float(amount: Any) -> float:
    return float(amount.detach() if isinstance(amount, torch.Tensor) else amount)


class OptimizedShard(Protocol):
    """This rank's part of one parameter."""

    name: str
    master: Any  # float32, with its gradient in `grad` when a step is taken

    @property
    def decays(self) -> bool:
        """Weight decay applies: not to vectors."""

    def refresh(self) -> None:
        """Copy the master to the module's parameter."""


S = TypeVar("S", bound=OptimizedShard)

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class MasterOptimizer(Generic[S]):
    """Steps the masters of the trained shards. Its state exists from the start: zeros."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[S]) -> None:
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

    def state(self) -> Iterator[tuple[S, Mapping[str, Any]]]:
        """Of each trained shard ``step``, ``exp_avg`` and ``exp_avg_sq``, with scales if they are in 8 bits, or
        ``momentum_buffer``: the live tensors."""
        return ((shard, self._inner.state[shard.master]) for shard in self._shards)

    def moments(self, locate: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
        """:meth:`state` by name, at the places that ``locate`` gives."""
        return {shard.name: {kind: locate(tensor) for kind, tensor in state.items()} for shard, state in self.state()}

    def tensors(self) -> list[Any]:
        return [tensor for _, state in self.state() for tensor in state.values()]

    def read(self, state: Mapping[str, Any], kind: str) -> Any:
        """One of :meth:`state` in float32."""
        return self._inner.read(state, kind) if isinstance(self._inner, eight_bit.AdamW8bit) else state[kind]

    def write(self, state: Mapping[str, Any], kind: str, value: Any) -> None:
        if isinstance(self._inner, eight_bit.AdamW8bit):
            self._inner.write(state, kind, value)
        else:
            state[kind].copy_(value)


def make_state(config: OptimizerConfig, master: Any, of_matrices: bool) -> dict[str, Any]:
    """The optimizer's state of a parameter, or of a flat part of several: zeros."""
    if config.name == "adamw_8bit":
        return eight_bit.make_state(master, of_matrices)
    kinds = _MOMENTS[config.name] if config.name == "adamw" or config.momentum else ()
    state = {kind: torch.zeros_like(master, requires_grad=False) for kind in kinds}
    if config.name == "adamw":
        state["step"] = torch.zeros((), device=master.device)
    return state


def build_optimizer(config: OptimizerConfig, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """Groups without parameters are left out."""
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        # SGD's decay goes through the gradient and the momentum; this one is decoupled, as AdamW's is.
        groups = [{**group, "weight_decay": 0.0, "decayed": group["weight_decay"] > 0} for group in groups]
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    groups = [{**group, "decayed": False} for group in groups]
    if config.name == "adamw_8bit":
        return eight_bit.AdamW8bit(groups, config.lr, config.betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


@torch.no_grad()
def restore_state(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copy a rank's state into its live tensors. Both have ``layout``, ``model`` (tensors by name) and ``optimizer``
    (None if frozen; else by name the tensors of each kind).

    Raises:
        WeightSyncError: the state is of another model; nothing was changed.
        OtherLayout: its ranks have divided the model otherwise; nothing was changed.
        EngineError: one of the two is frozen, or the state has been released; nothing was changed.
    """
    moments, own_moments = state["optimizer"], own["optimizer"]
    if (moments is None) != (own_moments is None):
        raise EngineError("the state of a trained engine does not fit a frozen one, nor the reverse")
    if state["layout"] != own["layout"]:
        raise OtherLayout(
            f"the state is of layout {state['layout']}, not {own['layout']}: a checkpoint can be read in both"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in own["model"].items()}
    faults = describe_shape_mismatches(shapes, {name: tuple(tensor.shape) for name, tensor in state["model"].items()})
    faults += [f"the optimizer's '{name}' is unknown" for name in moments or {} if name not in own_moments]
    faults += [f"the optimizer's '{name}' is missing" for name in own_moments or {} if name not in moments]
    if not faults and moments and any(moments[name].keys() != kinds.keys() for name, kinds in own_moments.items()):
        faults = ["its optimizer is of another kind"]
    if faults:
        raise WeightSyncError("the state is of another model: " + "; ".join(faults))
    if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in state["model"].values()):
        raise EngineError("the state's tensors were released with their engine: take a copy before meta()")
    for name, tensor in own["model"].items():
        tensor.copy_(state["model"][name])
    for name, kinds in (own_moments or {}).items():
        for kind, tensor in kinds.items():
            tensor.copy_(moments[name][kind])


class ShardedBackend(ABC):
    """The methods of a :class:`TrainBackend` whose ranks step the masters of their shards."""

    parked: ParkedTensors
    shards: Any
    """Iterates over the shards; sums, measures and drops their gradients."""

    optimizer: MasterOptimizer[Any] | None
    _ranks: Ranks

    def reduce_gradients(self) -> list[Any]:
        gradients: list[Any] = self.shards.take_gradients()
        return gradients

    def gradient_norm(self) -> float:
        return float(self.shards.gradient_norm(self._ranks))

    def first_bad_gradient(self) -> str:
        return str(self.shards.first_bad_gradient(self._ranks))

    def update(self, version: int, norm: float) -> float:
        assert self.optimizer is not None
        return self.optimizer.step(version, norm)

    def drop_gradients(self) -> None:
        self.shards.drop_gradients()

    @abstractmethod
    def local_state(self) -> dict[str, Any]: ...

    def _moments(self) -> dict[str, Any] | None:
        return None if self.optimizer is None else self.optimizer.moments(self.parked.locate)

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        restore_state(self.local_state(), state)
        self._refresh()

    def _refresh(self) -> None:
        for shard in self.shards:
            shard.refresh(self.parked.locate)

    def release(self) -> None: ...
