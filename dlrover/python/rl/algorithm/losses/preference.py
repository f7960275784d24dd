# SPDX-License-Identifier: Apache-2.0
"""Pairs of sequences, one of them preferred: the shared part of losses on pairs."""

from dataclasses import dataclass

import numpy as np
import torch

from dlrover.python.rl.algorithm.losses.columns import (
    Metrics,
    SampleView,
    TokenColumns,
    TokenUnits,
    column,
    weighted_sum,
)
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch


def add_pair_columns(rows: Batch, token_means: bool = False) -> Batch:
    """Add ``unit`` (int64: the pair), ``sign`` and ``weight`` (float32), each ``[rows]``; raise DataError if a pair is
    not one chosen and one rejected row.

    ``sign`` is 1 on chosen and -1 on rejected rows, divided by the row's action tokens with ``token_means``. The
    weights of a pair's tokens add up to 1 / pairs; a pair with an empty row does not count."""
    pair, chosen, length = rows.dense("pair"), rows.dense("chosen"), rows.dense("action_tokens")
    samples = SampleView.of(rows, by="pair")
    sizes = np.bincount(samples.of_row)
    wrong = (sizes != 2) | (np.bincount(samples.of_row, weights=chosen) != 1)
    if wrong.any():
        numbers = np.unique(pair)[wrong].tolist()
        raise DataError(f"a pair is one chosen and one rejected row: {numbers[:20]} are not")
    whole = np.bincount(samples.of_row, weights=length > 0) == 2
    counted = SampleView(rows, samples.of_row, samples.action_tokens, whole)
    sign = np.where(chosen, 1.0, -1.0) * whole[samples.of_row]
    if token_means:
        sign = sign / np.maximum(length, 1)
    return rows.with_columns(unit=pair, sign=sign.astype(np.float32), weight=counted.weights("sequence"))


@dataclass(frozen=True, eq=False)
class Margins:
    chosen: torch.Tensor
    rejected: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, columns: TokenColumns) -> "Margins":
        """Sum ``values`` ``[tokens]`` over each sequence, times the size of ``sign``."""
        units, sign = TokenUnits.of(columns), column(columns, "sign")
        sides, weight = (sign.clamp(min=0), (-sign).clamp(min=0)), units.sums(column(columns, "weight"))
        complete = (units.sums(sides[0]) > 0) & (units.sums(sides[1]) > 0)
        if bool(((weight > 0) & ~complete).any()):
            raise DataError("a pair is divided: both rows must be on one rank and in one micro-batch")
        return cls(units.sums(sides[0] * values), units.sums(sides[1] * values), weight)

    @property
    def margin(self) -> torch.Tensor:
        return self.chosen - self.rejected

    def metrics(self, scale: float = 1.0) -> Metrics:
        ahead = (self.margin.detach().sign() + 1) / 2
        return {
            "accuracy": weighted_sum(self.weight, ahead),
            "margin": scale * weighted_sum(self.weight, self.margin),
            "chosen": scale * weighted_sum(self.weight, self.chosen),
            "rejected": scale * weighted_sum(self.weight, self.rejected),
        }
