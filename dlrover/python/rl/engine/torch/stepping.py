"""What a step is in every train engine: rows into micro-batches, losses into sums, and when it is refused.

An engine adds how a micro-batch is read, how gradients become one gradient, and its optimizer::

    micros = agreed_micro_batches(ranks, needs_actions=True, cut=..., check=...)  # EngineError, on every rank
    sums = accumulate(micros, batch, loss, read, backward, device)
    totals = ranks.sum_scalars(sums if this rank speaks for its model replica else {})
    value = settle(totals, version)        # NonFiniteUpdate, on every rank
    ...                                    # sum the gradients; their norm
    check_norm(norm, first, version)       # NonFiniteUpdate, on every rank
    ...                                    # clip, learning_rate(config, version), step
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import OptimizerConfig, TokenLoss
from dlrover.python.rl.engine.torch.packing import MicroBatch
from dlrover.python.rl.engine.torch.ranks import Ranks, told_by_ranks

Read: TypeAlias = Callable[[MicroBatch, bool], tuple[Any, ...]]
"""``read(micro, entropy) -> (outputs, entropies or None)``, each ``[actions]``, with gradient; with candidates the
outputs are ``[actions, 1 + n]``."""

_LOSS, _TOKENS, _BAD = "\0loss", "\0tokens", "\0bad "  # names that no metric of a user's loss has


def agreed_micro_batches(
    ranks: Ranks, needs_actions: bool, cut: Callable[[int], list[MicroBatch]], check: Callable[[], None]
) -> list[MicroBatch]:
    """This rank's micro-batches, as many as every other rank has, so that all work in step.

    Args:
        ranks: all ranks of the engine.
        needs_actions: whether it is an error that no rank has an action token.
        cut: gives at least so many micro-batches, those beyond the rows without any.
        check: raises an :class:`EngineError` where the batch does not fit the model.

    Raises:
        EngineError: the batch of some rank does not fit, which every rank says, so that none waits for another; or no
            rank has an action token.
    """
    micros, fault = [], ""
    try:
        check()
        micros = cut(0)
    except EngineError as error:
        fault = str(error)
    told = ranks.gather((fault, len(micros)))
    if faults := told_by_ranks([fault for fault, _ in told]):
        raise EngineError(faults)
    most = max(count for _, count in told)
    if needs_actions and not most:
        raise EngineError("no row of the batch has an action token: there is nothing to learn from")
    return micros if len(micros) == most else cut(most)


def accumulate(  # noqa: PLR0913 - what differs between engines is handed in
    micros: Iterable[MicroBatch],
    batch: Batch,
    loss: TokenLoss,
    read: Read,
    backward: Callable[[Any], None],
    device: str = "cpu",
) -> dict[str, float]:
    """Add up this rank's gradients; return its summed loss, token count and metrics, for :func:`settle`."""
    totals = {_LOSS: 0.0, _TOKENS: 0.0}
    wants_entropy = bool(getattr(loss, "wants_entropy", False))
    for micro in micros:
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
        if not math.isfinite(_number(value)):
            totals.setdefault(f"{_BAD}{first_bad({'outputs': outputs, **columns})}", 1.0)
        backward(value)
        for name, amount in {_LOSS: value, _TOKENS: len(micro.flat), **metrics}.items():
            totals[name] = totals.get(name, 0.0) + _number(amount)
    return totals


def settle(totals: dict[str, float], version: int) -> float:
    """Take what is not a metric out of the sums over all ranks; return the loss.

    Raises:
        NonFiniteUpdate: the loss is not finite; names the tensor that was first.
    """
    value = totals.pop(_LOSS)
    totals.pop(_TOKENS)
    bad = [name for name in totals if name.startswith(_BAD)]
    if not math.isfinite(value):
        where = bad[0].removeprefix(_BAD) if bad else "the sum over the micro-batches"
        raise _refusal(f"the loss is {value}", where, version)
    return value


def check_norm(norm: float, first: Callable[[], str], version: int) -> None:
    """Refuse a gradient that is not finite.

    Args:
        norm: of the whole gradient, the same on every rank.
        first: finds the name of the first tensor that is not finite; every rank calls it.
        version: of the weights.

    Raises:
        NonFiniteUpdate: it is so.
    """
    if not math.isfinite(norm):
        raise _refusal(f"the gradient norm is {norm}", first(), version)


def _refusal(what: str, where: str, version: int) -> NonFiniteUpdate:
    kept = f"the update of version {version} is refused and the weights are as they were"
    return NonFiniteUpdate(f"{what} (first in: {where}): {kept}")


def first_bad(tensors: Mapping[str, Any]) -> str:
    """The name of the first tensor that holds a NaN or an infinity."""
    bad = (name for name, tensor in tensors.items() if tensor is not None and not bool(tensor.isfinite().all()))
    return next(bad, "a sum of finite numbers")


def learning_rate(config: OptimizerConfig, steps_taken: int) -> float:
    """The rate of the next step: rises linearly to the peak over the warm-up, and then falls as the schedule says.

    ``cosine`` is half a period (Loshchilov and Hutter, arXiv:1608.03983, eq. 5, without restarts).

    Raises:
        EngineError: nobody has said over how many steps it falls.
    """
    if steps_taken < config.warmup_steps:
        return config.lr * (steps_taken + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.decay_steps is None:
        raise EngineError(f"a {config.schedule} schedule needs decay_steps: over how many steps the rate falls")
    done = (steps_taken - config.warmup_steps) / max(config.decay_steps - config.warmup_steps, 1)
    left = 1 - min(done, 1.0) if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.min_lr + (config.lr - config.min_lr) * left


def clip_factor(norm: float, most: float | None) -> float:
    """What a gradient of norm ``norm`` is multiplied with, so that its norm is ``most`` at most."""
    return 1.0 if most is None or norm <= most else most / (norm + 1e-6)


def _number(amount: Any) -> float:
    return float(amount.detach() if isinstance(amount, torch.Tensor) else amount)
