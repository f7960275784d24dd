"""What evaluating a batch gives, put back to where its tokens stand."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch
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


def gathered(batch: Batch, name: str, found: Iterable[tuple[MicroBatch, tuple[Any, ...]]]) -> Batch:
    """The outputs of micro-batches as columns like ``tokens``, 0 outside of the action mask.

    Args:
        batch: what was evaluated.
        name: of the outputs.
        found: each micro-batch with its outputs (``[actions]``, or ``[actions, 1 + n]`` with log-probs of n more ids
            behind each), its entropies or None, and where asked its most likely ids.
    """
    tokens = batch.ragged("tokens")
    columns: dict[str, Any] = {name: np.zeros(len(tokens.values), dtype=np.float32)}
    for micro, (outputs, entropies, *likely) in found:
        told = {name: outputs if outputs.ndim == 1 else outputs[:, 0], "entropy": entropies}
        if outputs.ndim == 2:
            told |= {"candidate_logprobs": outputs[:, 1:], "candidates": likely[0] if likely else None}
        for key, tensor in told.items():
            if tensor is not None:
                values = tensor.cpu().numpy()
                column = columns.setdefault(key, np.zeros((len(tokens.values), *values.shape[1:]), values.dtype))
                column[micro.flat] = values
    return Batch({key: tokens.like(values) for key, values in columns.items()})
