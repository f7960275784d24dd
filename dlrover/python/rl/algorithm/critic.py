"""The critic of PPO: its loss, and where its values stand.

A model with a score head says at each token what it makes of all up to there. So the value *before* an action is the
score of the token before it, and a critic's batch has its action mask and its columns one token to the left.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Gt

from dlrover.python.rl.algorithm.base import Metrics, TokenColumns, column, weighted_sum
from dlrover.python.rl.algorithm.fields import check_fields
from dlrover.python.rl.data.batch import Batch, Ragged


@dataclass(frozen=True)
class ValueLoss:
    """``max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2`` of each token; a loss for train engines.

    The clip is that of PPO's published code (openai/baselines, ``ppo2``); the paper has none.
    """

    clip: Annotated[float, Gt(0.0)] | None = 0.2
    """How far a value may move from ``values``, those before the update, before its gradient stops; None: freely."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, scores: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """The weighted sum of token losses.

        Args:
            scores: V, ``[tokens]``, with gradient.
            columns: ``returns``, ``weight`` and, with a clip, ``values``, each ``[tokens]``.

        Returns:
            The loss; and the weighted sums ``value``, ``value_error`` (squared, not clipped) and, with a clip,
            ``value_clip_fraction`` (tokens whose gradient it stopped).
        """
        returns, weight = column(columns, "returns"), column(columns, "weight")
        errors = (scores - returns).square()
        metrics = {"value": weighted_sum(weight, scores), "value_error": weighted_sum(weight, errors)}
        if self.clip is not None:
            old = column(columns, "values")
            clipped = (old + (scores - old).clamp(-self.clip, self.clip) - returns).square()
            metrics["value_clip_fraction"] = weighted_sum(weight, (clipped > errors).to(weight.dtype))
            errors = torch.maximum(errors, clipped)
        return (weight * errors).sum() / 2, metrics


def before_actions(batch: Batch) -> Batch:
    """The batch a critic is to read: ragged columns but ``tokens`` one token to the left, dense ones as they are."""
    moved = {
        name: column.like(_moved(column, to_the_left=True))
        for name, column in batch.columns.items()
        if isinstance(column, Ragged) and name != "tokens"
    }
    return batch.with_columns(**moved)


def at_actions(scores: Ragged) -> Ragged:
    """A critic's scores ``[rows, seq]`` one token to the right: each action gets the value before it."""
    return scores.like(_moved(scores, to_the_left=False))


def _moved(column: Ragged, to_the_left: bool) -> np.ndarray:
    """The flat values, each row's moved by one; what becomes free is 0."""
    values = np.zeros_like(column.values)
    filled = np.flatnonzero(column.lengths > 0)
    if to_the_left:
        values[:-1] = column.values[1:]
        values[column.offsets[filled + 1] - 1] = 0
    else:
        values[1:] = column.values[:-1]
        values[column.offsets[filled]] = 0
    return values
