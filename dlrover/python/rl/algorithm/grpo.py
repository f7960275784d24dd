"""GRPO: group-relative policy optimisation (DeepSeekMath, Shao et al., arXiv:2402.03300, eq. 3 and 4)."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt

from dlrover.python.rl.algorithm.advantages import Normalize, check_group_size, group_advantages
from dlrover.python.rl.algorithm.averaging import token_weights
from dlrover.python.rl.algorithm.base import Metrics, TokenColumns, column, counted_rows, weighted_sum
from dlrover.python.rl.algorithm.fields import check_fields
from dlrover.python.rl.algorithm.kl import KLPenalty, check_penalty, kl_estimate, kl_penalty
from dlrover.python.rl.algorithm.policy_loss import clipped_surrogate
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class GRPO:
    """The mean over samples of each one's mean token loss ``-min(A r, A clip(r)) + kl_coef * KL(pi || ref)``."""

    clip_low: Annotated[float, Ge(0.0), Lt(1.0)] = 0.2
    """How far the ratio may fall below 1."""

    clip_high: Annotated[float, Ge(0.0)] = 0.2
    """How far the ratio may rise above 1."""

    kl_coef: Annotated[float, Ge(0.0)] = 0.0
    """Weight of the KL penalty; above 0 the reference's log-probs are needed. The paper uses 0.04."""

    kl_estimator: KLPenalty = "k3"
    """Estimator of the KL penalty; the paper's eq. 4 is k3."""

    averaging: Literal["token", "sequence"] = "sequence"
    """Mean over tokens, or over sequences of their token means as in the paper."""

    normalize: Normalize = "std"
    """Divide a group's centred rewards by their standard deviation as in the paper, or not."""

    def __post_init__(self) -> None:
        check_penalty(self.kl_estimator)
        check_fields(self)

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Raise ValueError for groups of one sample."""
        check_group_size(samples_per_prompt)

    def annotate(self, rows: Batch) -> Batch:
        """Add ``advantage`` and ``weight``, see :class:`~dlrover.python.rl.algorithm.base.Algorithm`."""
        counted = counted_rows(rows)
        advantage = group_advantages(rows.dense("prompt_id"), rows.dense("reward"), self.normalize, counted)
        weight = token_weights(rows.dense("action_tokens"), counted, self.averaging)
        return rows.with_columns(advantage=advantage, weight=weight)

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """Weighted sum over the tokens; metrics of the clipped surrogate, and ``kl`` (k3) with a penalty."""
        weight = column(columns, "weight")
        losses, metrics = clipped_surrogate(logprobs, columns, self.clip_low, self.clip_high)
        if self.kl_coef > 0:
            reference = column(columns, "ref_logprobs")
            losses = losses + self.kl_coef * kl_penalty(logprobs, reference, self.kl_estimator)
            metrics["kl"] = weighted_sum(weight, kl_estimate(logprobs.detach(), reference, "k3"))
        return (weight * losses).sum(), metrics
