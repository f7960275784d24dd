"""Pairs of sequences, one of which is preferred: what losses on them have in common."""

from dataclasses import dataclass

import numpy as np
import torch

from dlrover.python.rl.algorithm.base import Metrics, TokenColumns, column, weighted_sum
from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.algorithm.units import Units
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch


def with_pairs(rows: Batch, token_means: bool = False) -> Batch:
    """Add ``unit`` (int64: the pair), ``sign`` and ``weight`` (float32), each ``[rows]``.

    ``sign`` is 1 on the tokens of chosen rows and -1 on those of rejected ones, divided by the row's action tokens if a
    row's tokens are to be averaged. The weights of a pair's tokens add up to 1 / pairs; a pair of which a row has no
    action token counts nowhere.

    Args:
        rows: ``pair`` (int64), ``chosen`` (bool) and ``action_tokens`` (int64), each ``[rows]``.
        token_means: average over a row's tokens instead of adding up.

    Raises:
        DataError: a pair is not one chosen and one rejected row.
    """
    pair, chosen, length = rows.dense("pair"), rows.dense("chosen"), rows.dense("action_tokens")
    samples = Samples.of(rows, by="pair")
    sizes = np.bincount(samples.of_row)
    wrong = (sizes != 2) | (np.bincount(samples.of_row, weights=chosen) != 1)
    if wrong.any():
        numbers = np.unique(pair)[wrong].tolist()
        raise DataError(f"a pair is one chosen and one rejected row: {numbers[:20]} are not")
    whole = np.bincount(samples.of_row, weights=length > 0) == 2
    counted = Samples(rows, samples.of_row, samples.action_tokens, whole)
    sign = np.where(chosen, 1.0, -1.0) * whole[samples.of_row]
    if token_means:
        sign = sign / np.maximum(length, 1)
    return rows.with_columns(unit=pair, sign=sign.astype(np.float32), weight=counted.weights("sequence"))


@dataclass(frozen=True, eq=False)
class Margins:
    """The pairs of a micro-batch.

    Attributes:
        chosen: what speaks for the chosen sequence, ``[pairs]``.
        rejected: what speaks for the rejected one, ``[pairs]``.
        weight: of each pair, ``[pairs]``; 1 over a whole update.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, columns: TokenColumns) -> "Margins":
        """Sum ``values`` ``[tokens]`` over each sequence, times the size of ``sign``.

        Raises:
            DataError: of some pair there is one sequence only.
        """
        units, sign = Units.of(columns), column(columns, "sign")
        sides, weight = (sign.clamp(min=0), (-sign).clamp(min=0)), units.sums(column(columns, "weight"))
        there = (units.sums(sides[0]) > 0) & (units.sums(sides[1]) > 0)
        if bool(((weight > 0) & ~there).any()):
            raise DataError("a pair has been divided: both its rows have to be on one rank and in one micro-batch")
        return cls(units.sums(sides[0] * values), units.sums(sides[1] * values), weight)

    @property
    def margin(self) -> torch.Tensor:
        """By how much the chosen sequence is ahead, ``[pairs]``."""
        return self.chosen - self.rejected

    def metrics(self, scale: float = 1.0) -> Metrics:
        """Means over the pairs: ``accuracy`` (the chosen one ahead; a tie counts as half), ``margin``, ``chosen`` and
        ``rejected``; the last three times ``scale``."""
        ahead = (self.margin.detach().sign() + 1) / 2
        return {
            "accuracy": weighted_sum(self.weight, ahead),
            "margin": scale * weighted_sum(self.weight, self.margin),
            "chosen": scale * weighted_sum(self.weight, self.chosen),
            "rejected": scale * weighted_sum(self.weight, self.rejected),
        }
