# SPDX-License-Identifier: Apache-2.0
"""A reward model from preferences (Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155, eq. 1)."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.losses.columns import Metrics, TokenColumns, add_pair_columns, pair_margins
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class RewardModel(Algorithm):
    """The mean over pairs of ``-log sigmoid(chosen score - rejected score)``, scores at the last token."""

    def annotate(self, rows: Batch) -> Batch:
        return add_pair_columns(rows, token_means=True)

    def loss(self, scores: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        margin, weight, metrics = pair_margins(scores, columns)
        return -(weight * functional.logsigmoid(margin)).sum(), metrics
