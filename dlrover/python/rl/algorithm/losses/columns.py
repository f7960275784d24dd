# SPDX-License-Identifier: Apache-2.0
"""The columns of a micro-batch that a loss reads, and weights per token that hold the global normaliser."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.names import hint

TokenColumns: TypeAlias = Mapping[str, torch.Tensor]
"""Columns aligned with the action tokens of a micro-batch, each ``[tokens]``, a few ``[tokens, n]``."""

Metrics: TypeAlias = dict[str, Any]
"""0-d tensors without gradient that add up, over micro-batches and ranks, to the weighted mean over the update."""

TokenLosses: TypeAlias = tuple[torch.Tensor, Metrics]
"""Unweighted losses ``[tokens]``, and weighted metrics."""


@dataclass(frozen=True)
class Needs:
    """Columns that an algorithm requires besides ``tokens`` and those that :meth:`Algorithm.annotate` adds.

    ``annotate``: ragged ``[rows, seq]``, of annotated rows; may include ``action_mask``. ``loss``: among the columns of
    the loss; the train engine computes ``entropy``, and ``candidate_logprobs`` if the batch has ``candidates``.

    ``old_logprobs`` are of the policy before the update, from the train engine or, without a correction, from the
    rollout engine; ``rollout_logprobs`` of the rollout engine, ``ref_logprobs`` of a frozen reference,
    ``teacher_logprobs`` of a teacher; ``values`` (before each action) of a critic.
    """

    annotate: frozenset[str] = frozenset()
    loss: frozenset[str] = frozenset()

    @property
    def all(self) -> frozenset[str]:
        return self.annotate | self.loss


def column(columns: TokenColumns, name: str) -> torch.Tensor:
    try:
        return columns[name]
    except KeyError:
        raise DataError(f"the loss needs the column '{name}'{hint(name, columns)}") from None


def weighted_sum(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (weight * values.detach()).sum()


Averaging: TypeAlias = Literal["token", "sequence", "sum", "constant"]
"""``token``: the mean over all action tokens. ``sequence``: the mean over sequences of each one's token mean. ``sum``:
the mean over sequences of each one's token sum. ``constant``: the same divided by a fixed length."""


def token_weights(
    action_tokens: npt.NDArray[np.int64],
    valid: npt.NDArray[np.bool_],
    mode: Averaging,
    max_tokens: int | None = None,
) -> npt.NDArray[np.float32]:
    """The weight of each action token of every row (or sample): ``[rows]``.

    With n_i the action tokens of row i, and N_a and N_s the action tokens and the sequences that count in the whole
    update: ``token`` 1/N_a (DAPO, arXiv:2503.14476, eq. 8), ``sequence`` 1/(n_i N_s) (GRPO, arXiv:2402.03300, eq. 3),
    ``sum`` 1/N_s (a whole sequence is one action: RLOO, arXiv:2402.14740), ``constant`` 1/(N_s ``max_tokens``) (Dr.
    GRPO, arXiv:2503.20783, section 3.2). Rows that are not ``valid`` or have no action token do not count: 0.

    Raises:
        ValueError: unknown ``mode``, or ``constant`` without a positive ``max_tokens``.
    """
    counted = valid & (action_tokens > 0)
    lengths = np.where(counted, action_tokens, 0).astype(np.float64)
    sequences = max(int(counted.sum()), 1)
    if mode == "token":
        divisor = np.full(len(lengths), max(lengths.sum(), 1.0))
    elif mode == "sequence":
        divisor = np.maximum(lengths, 1.0) * sequences
    elif mode == "sum":
        divisor = np.full(len(lengths), float(sequences))
    elif mode == "constant":
        if max_tokens is None or max_tokens < 1:
            raise ValueError("averaging 'constant' divides by max_tokens: set it to the maximum tokens of a completion")
        divisor = np.full(len(lengths), float(sequences * max_tokens))
    else:
        raise ValueError(f"unknown averaging '{mode}'{hint(mode, get_args(Averaging))}")
    return np.where(counted, 1.0 / divisor, 0.0).astype(np.float32)


@dataclass(frozen=True, eq=False)
class TokenUnits:
    """Tokens that a loss sums together, a sequence or a pair. ``index``: ``[tokens]``, from 0."""

    index: torch.Tensor
    count: int

    @classmethod
    def of(cls, columns: TokenColumns) -> "TokenUnits":
        numbers, index = torch.unique(column(columns, "unit"), return_inverse=True)
        return cls(index, len(numbers))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        return self.sums(values) / self.sums(torch.ones_like(values))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.index]
