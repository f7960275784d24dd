# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the mean of ``-log pi`` over the trained tokens."""

from dataclasses import dataclass
from typing import Literal

import torch

from dlrover.python.rl.algorithm.losses.columns import Metrics, Needs, TokenColumns, column, token_weights
from dlrover.python.rl.algorithm.losses.fields import check_fields
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class SFT:
    averaging: Literal["token", "sequence"] = "token"
    """Mean over the tokens of the global batch, or over sequences of their token means."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs(self) -> Needs:
        return Needs()

    def check_group_size(self, samples_per_prompt: int) -> None: ...

    def annotate(self, rows: Batch) -> Batch:
        action_tokens = rows.dense("action_tokens")
        return rows.with_columns(weight=token_weights(action_tokens, action_tokens > 0, self.averaging))

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """The metric ``nll`` is the loss; with averaging ``token``, ``exp`` of its sum is the update's perplexity."""
        loss = -(column(columns, "weight") * logprobs).sum()
        return loss, {"nll": loss.detach()}
