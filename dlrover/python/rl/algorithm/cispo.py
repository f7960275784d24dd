"""CISPO: REINFORCE with clipped importance weights, so no token loses its gradient (MiniMax-M1, arXiv:2506.13585)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le

from dlrover.python.rl.algorithm.advantages import Normalize, group_advantages
from dlrover.python.rl.algorithm.base import TokenColumns, TokenLosses, column, weighted_sum
from dlrover.python.rl.algorithm.policy import PolicyGradient
from dlrover.python.rl.algorithm.policy_loss import MOST
from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class CISPO(PolicyGradient):
    """The token loss ``-stop_gradient(clip(r)) A log pi`` (eq. 4 and 5)."""

    clip_low: Annotated[float, Ge(0.0), Le(1.0)] = 1.0
    """How far the weight may fall below 1; at 1 it may fall freely, as in the paper's experiments."""

    clip_high: Annotated[float, Ge(0.0)] = 2.0
    """How far the weight may rise above 1; the paper tunes it without naming a value."""

    normalize: Normalize = "std"
    """Divide a group's centred rewards by their standard deviation as in the paper, or not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None:
            raise ValueError("dual_clip is of the clipped surrogate: a CISPO weight is bounded by clip_high already")

    def advantages(self, samples: Samples) -> Column:
        """Rewards less their group's mean, in standard deviations of the group: float32 ``[rows]``."""
        reward = self.rewards(samples)
        return samples.spread(group_advantages(samples.prompt_id, reward, self.normalize, samples.counted))

    def surrogate(self, logprobs: torch.Tensor, columns: TokenColumns) -> TokenLosses:
        """``clip_fraction``: tokens whose weight the clip has changed."""
        advantage, weight = column(columns, "advantage"), column(columns, "weight")
        log_ratio = (logprobs - column(columns, "old_logprobs")).detach().clamp(max=MOST)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {
            "ratio": weighted_sum(weight, ratio),
            "clip_fraction": weighted_sum(weight, (clipped != ratio).to(weight.dtype)),
            "approx_kl": weighted_sum(weight, torch.expm1(log_ratio) - log_ratio),
            "weight": weight.sum(),
        }
        return -clipped * advantage * logprobs, metrics
