# SPDX-License-Identifier: Apache-2.0
"""CISPO: REINFORCE with clipped importance weights, so no token loses its gradient (MiniMax-M1, arXiv:2506.13585)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le

from dlrover.python.rl.algorithm.losses.columns import TokenColumns, TokenLosses, column
from dlrover.python.rl.algorithm.losses.policy_gradient import MAX_LOG_RATIO, GroupRelative, ratio_metrics


@dataclass(frozen=True)
class CISPO(GroupRelative):
    """The token loss ``-stop_gradient(clip(r)) A log pi`` (eq. 4 and 5)."""

    #: how far the weight may fall below 1; 1: no bound, as in the paper's experiments
    clip_low: Annotated[float, Ge(0.0), Le(1.0)] = 1.0
    clip_high: Annotated[float, Ge(0.0)] = 2.0  #: how far the weight may rise above 1; the paper names no value

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None:
            raise ValueError("dual_clip belongs to the clipped surrogate: clip_high already bounds a CISPO weight")

    def surrogate(self, logprobs: torch.Tensor, columns: TokenColumns) -> TokenLosses:
        advantage, weight = column(columns, "advantage"), column(columns, "weight")
        log_ratio = (logprobs - column(columns, "old_logprobs")).detach().clamp(max=MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -clipped * advantage * logprobs, ratio_metrics(weight, log_ratio, clipped != ratio)
