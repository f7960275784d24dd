"""Sums over units: tokens that a loss looks at together, those of a sequence or of a pair of sequences."""

from dataclasses import dataclass

import torch

from dlrover.python.rl.algorithm.base import TokenColumns, column


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a micro-batch, which has all tokens of each.

    Attributes:
        index: ``[tokens]``: the unit of each token, from 0.
        count: how many units there are.
    """

    index: torch.Tensor
    count: int

    @classmethod
    def of(cls, columns: TokenColumns) -> "Units":
        """Tokens with the same number in ``unit``."""
        found, index = torch.unique(column(columns, "unit"), return_inverse=True)
        return cls(index, len(found))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """``[tokens]`` to ``[units]``."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """``[tokens]`` to ``[units]``."""
        return self.sums(values) / self.sums(torch.ones_like(values))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """``[units]`` to ``[tokens]``."""
        return values[self.index]
