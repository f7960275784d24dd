# SPDX-License-Identifier: Apache-2.0
"""A reward model from preferences (Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155, eq. 1)."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from dlrover.python.rl.algorithm.losses.columns import Metrics, Needs, TokenColumns
from dlrover.python.rl.algorithm.losses.preference import Margins, add_pair_columns
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class RewardModel:
    """The mean over pairs of ``-log sigmoid(score of the chosen - score of the rejected)``, scores at the last
    token."""

    @property
    def needs(self) -> Needs:
        return Needs()

    def check_group_size(self, samples_per_prompt: int) -> None: ...

    def annotate(self, rows: Batch) -> Batch:
        return add_pair_columns(rows, token_means=True)

    def loss(self, scores: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        pairs = Margins.of(scores, columns)
        return -(pairs.weight * functional.logsigmoid(pairs.margin)).sum(), pairs.metrics()
