"""What evaluating a batch gives, put back to where its tokens stand."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Array, Batch
from dlrover.python.rl.engine.torch.packing import Head, MicroBatch


def check_asked(batch: Batch, head: Head, entropy: bool, top: int) -> None:
    """Refuse what a model cannot say.

    Raises:
        EngineError: scores have neither entropy nor likely ids; or ``candidates`` and ``top`` ask for the same column.
    """
    if entropy and head != "causal":
        raise EngineError("scores have no entropy: only a causal head draws tokens")
    if top and head != "causal":
        raise EngineError("scores are of no ids: only a causal head has likely ones")
    if top and "candidates" in batch:
        raise EngineError("the batch has 'candidates', and 'top' asks for others: one of the two")


def gathered(
    batch: Batch,
    head: Head,
    found: Iterable[tuple[MicroBatch, tuple[Any, ...]]],
    entropy: bool = False,
    top: int = 0,
) -> Batch:
    """The outputs of micro-batches as columns like ``tokens``, 0 outside of the action mask. All that was asked for is
    there, of a batch without an action token too.

    Args:
        batch: what was evaluated.
        head: of the model: outputs are ``logprobs`` or ``scores``.
        found: each micro-batch with its outputs (``[actions]``, or ``[actions, 1 + n]`` with log-probs of n more ids
            behind each), its entropies or None, and where asked its most likely ids.
        entropy: whether it was asked for.
        top: how many of the most likely ids were.
    """
    tokens, name = batch.ragged("tokens"), "logprobs" if head == "causal" else "scores"
    columns = _asked(batch, name, entropy, top)
    for micro, (outputs, entropies, *likely) in found:
        told = {name: outputs if outputs.ndim == 1 else outputs[:, 0], "entropy": entropies}
        if outputs.ndim == 2:
            told |= {"candidate_logprobs": outputs[:, 1:], "candidates": likely[0] if likely else None}
        for key, column in columns.items():
            column[micro.flat] = told[key].cpu().numpy()
    return Batch({key: tokens.like(values) for key, values in columns.items()})


def _asked(batch: Batch, name: str, entropy: bool, top: int) -> dict[str, Array]:
    """Zeros ``[total, ...]`` for every column that was asked for."""
    total = len(batch.ragged("tokens").values)
    columns: dict[str, Array] = {name: np.zeros(total, dtype=np.float32)}
    if entropy:
        columns["entropy"] = np.zeros(total, dtype=np.float32)
    if top:
        columns["candidates"] = np.zeros((total, top), dtype=np.int64)
        columns["candidate_logprobs"] = np.zeros((total, top), dtype=np.float32)
    elif name == "logprobs" and "candidates" in batch:
        columns["candidate_logprobs"] = np.zeros(batch.ragged("candidates").values.shape, dtype=np.float32)
    return columns
