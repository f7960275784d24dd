"""A reward model from preferences (Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155, eq. 1)."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from dlrover.python.rl.algorithm.base import Metrics, Needs, TokenColumns
from dlrover.python.rl.algorithm.pairs import Margins, with_pairs
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class RewardModel:
    """The mean over pairs of ``-log sigmoid(score of the chosen - score of the rejected)``.

    A sequence's score is that of its action token; rows have one, the last token.
    """

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Any number will do: nothing is sampled."""

    def annotate(self, rows: Batch) -> Batch:
        """Add ``unit``, ``sign`` and ``weight``, see :func:`~dlrover.python.rl.algorithm.pairs.with_pairs`."""
        return with_pairs(rows, token_means=True)

    def loss(self, scores: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """Weighted sum over the pairs; ``accuracy``, and the mean scores ``chosen``, ``rejected`` and ``margin``."""
        pairs = Margins.of(scores, columns)
        return -(pairs.weight * functional.logsigmoid(pairs.margin)).sum(), pairs.metrics()
