"""Supervised fine-tuning: the mean of ``-log pi`` over the trained tokens."""

from dataclasses import dataclass
from typing import Literal

import torch

from dlrover.python.rl.algorithm.averaging import token_weights
from dlrover.python.rl.algorithm.base import Metrics, Needs, TokenColumns, column
from dlrover.python.rl.algorithm.fields import check_fields
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class SFT:
    """Maximum likelihood. Rows need ``action_tokens`` alone."""

    averaging: Literal["token", "sequence"] = "token"
    """Mean over the tokens of the global batch, or over sequences of their token means."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Any number will do: examples are not compared."""

    def annotate(self, rows: Batch) -> Batch:
        """Add ``weight``, see :class:`~dlrover.python.rl.algorithm.base.Algorithm`."""
        action_tokens = rows.dense("action_tokens")
        return rows.with_columns(weight=token_weights(action_tokens, action_tokens > 0, self.averaging))

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """``sum(weight * -logprobs)``. The metric ``nll`` is the same; ``exp`` of its sum over the update is the
        perplexity (with averaging ``token``)."""
        loss = -(column(columns, "weight") * logprobs).sum()
        return loss, {"nll": loss.detach()}
