"""Dr. GRPO: GRPO done right (Liu et al., "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2).

Two biases of GRPO are gone. Dividing by the standard deviation favours questions that are nearly always or nearly never
solved; dividing by the length of each sample makes long wrong samples cheap. There is no KL term either.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt

from dlrover.python.rl.algorithm.advantages import check_group_size, group_advantages
from dlrover.python.rl.algorithm.averaging import token_weights
from dlrover.python.rl.algorithm.base import Metrics, TokenColumns, column, counted_rows
from dlrover.python.rl.algorithm.fields import check_fields
from dlrover.python.rl.algorithm.policy_loss import clipped_surrogate
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class DrGRPO:
    """The token loss ``-min(A r, A clip(r))`` with ``A = reward - mean(rewards of the prompt)``."""

    clip_low: Annotated[float, Ge(0.0), Lt(1.0)] = 0.2
    """How far the ratio may fall below 1."""

    clip_high: Annotated[float, Ge(0.0)] = 0.2
    """How far the ratio may rise above 1."""

    averaging: Literal["token", "constant"] = "token"
    """``constant`` is the paper's: each sample's sum is divided by ``max_tokens``, so the step does not depend on the
    lengths sampled. ``token``, common in practice, divides by the tokens of the whole update instead."""

    max_tokens: Annotated[int, Gt(0)] | None = None
    """The most tokens a completion may have; for averaging ``constant`` alone."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.averaging == "constant") != (self.max_tokens is not None):
            raise ValueError("max_tokens goes with averaging 'constant': give both or neither")

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Raise ValueError for groups of one sample."""
        check_group_size(samples_per_prompt)

    def annotate(self, rows: Batch) -> Batch:
        """Add ``advantage`` and ``weight``, see :class:`~dlrover.python.rl.algorithm.base.Algorithm`."""
        counted = counted_rows(rows)
        advantage = group_advantages(rows.dense("prompt_id"), rows.dense("reward"), "none", counted)
        weight = token_weights(rows.dense("action_tokens"), counted, self.averaging, self.max_tokens)
        return rows.with_columns(advantage=advantage, weight=weight)

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """Weighted sum over the tokens; metrics of the clipped surrogate."""
        losses, metrics = clipped_surrogate(logprobs, columns, self.clip_low, self.clip_high)
        return (column(columns, "weight") * losses).sum(), metrics
