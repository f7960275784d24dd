# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the mean of ``-log pi`` over the trained tokens."""

from dataclasses import dataclass
from typing import Literal

import torch

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.losses.columns import Metrics, TokenColumns, add_token_weights, column
from dlrover.python.rl.config.typed import check_fields
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class SFT(Algorithm):
    #: mean over the tokens of the global batch, or over sequences of their token means
    averaging: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        check_fields(self)

    def annotate(self, rows: Batch) -> Batch:
        return add_token_weights(rows, self.averaging)

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """The metric ``nll`` is the loss; with averaging ``token``, ``exp`` of its sum is the update's perplexity."""
        loss = -(column(columns, "weight") * logprobs).sum()
        return loss, {"nll": loss.detach()}
