# SPDX-License-Identifier: Apache-2.0
"""The critic: generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16), value loss, positions.

A model with a score head scores the text up to and including each token. So the value *before* an action is the score
of the previous token, and a critic's batch has its action mask and columns one token to the left."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Gt

from dlrover.python.rl.algorithm.losses.columns import Floats, Metrics, TokenColumns, column, weighted_sum
from dlrover.python.rl.config.typed import check_fields
from dlrover.python.rl.data.batch import Batch, Ragged


def gae(
    reward: Floats, value: Floats, lengths: npt.NDArray[np.int64], gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """``A_t = d_t + gamma lam A_(t+1)`` with ``d_t = r_t + gamma V_(t+1) - V_t``; V and A after the last action are 0.

    An action's successor is the sample's next *action*; observations in between are not steps. ``lengths``
    ``[samples]`` divides ``reward`` and ``value`` (before the action), ``[actions]``. Returns advantages and returns
    ``A + V``."""
    starts = np.cumsum(lengths) - lengths
    advantage = np.zeros(len(reward))
    next_value, next_advantage = np.zeros(len(lengths)), np.zeros(len(lengths))
    for step in range(int(lengths.max(initial=0)) - 1, -1, -1):
        active = np.flatnonzero(lengths > step)
        at = starts[active] + step
        error = reward[at] + gamma * next_value[active] - value[at]
        advantage[at] = next_advantage[active] = error + gamma * lam * next_advantage[active]
        next_value[active] = value[at]
    return advantage, advantage + value


def rewards_to_go(reward: Floats, lengths: npt.NDArray[np.int64], gamma: float = 1.0) -> Floats:
    """Return ``sum over s >= t of gamma^(s - t) r_s`` within each sample, ``[actions]``."""
    return gae(reward, np.zeros(len(reward)), lengths, gamma, 1.0)[0]


@dataclass(frozen=True)
class ValueLoss:
    """``max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2`` of each token; a loss for train engines.

    The clip comes from PPO's published code (openai/baselines, ``ppo2``); the paper has none."""

    #: how far a value may move from ``values`` (before the update) before its gradient stops; None: no bound
    clip: Annotated[float, Gt(0.0)] | None = 0.2

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, scores: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """``scores`` are V, ``[tokens]``; ``columns`` need ``returns``, ``weight`` and, with a clip, ``values``."""
        returns, weight = column(columns, "returns"), column(columns, "weight")
        errors = (scores - returns).square()
        metrics = {"value": weighted_sum(weight, scores), "value_error": weighted_sum(weight, errors)}
        if self.clip is not None:
            old = column(columns, "values")
            clipped = (old + (scores - old).clamp(-self.clip, self.clip) - returns).square()
            metrics["value_clip_fraction"] = weighted_sum(weight, (clipped > errors).to(weight.dtype))
            errors = torch.maximum(errors, clipped)
        return (weight * errors).sum() / 2, metrics


def shift_to_states(batch: Batch) -> Batch:
    """Move ragged columns except ``tokens`` one token to the left: the batch that a critic reads."""
    shifted = {
        name: column.like(_shift(column, left=True))
        for name, column in batch.columns.items()
        if isinstance(column, Ragged) and name != "tokens"
    }
    return batch.with_columns(**shifted)


def shift_to_actions(scores: Ragged) -> Ragged:
    """Move a critic's scores ``[rows, seq]`` one token to the right: each action gets the value before it."""
    return scores.like(_shift(scores, left=False))


def _shift(column: Ragged, left: bool) -> np.ndarray:
    """Return the flat values, moved by one in each row; free places are 0."""
    values = np.zeros_like(column.values)
    filled = np.flatnonzero(column.lengths > 0)
    if left:
        values[:-1] = column.values[1:]
        values[column.offsets[filled + 1] - 1] = 0
    else:
        values[1:] = column.values[:-1]
        values[column.offsets[filled]] = 0
    return values
