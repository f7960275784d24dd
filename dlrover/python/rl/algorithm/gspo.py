# SPDX-License-Identifier: Apache-2.0
"""GSPO: ratios of whole sequences, which rewards are for (Zheng et al., arXiv:2507.18071)."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt

from dlrover.python.rl.algorithm.losses.columns import Needs, TokenColumns, TokenLosses, TokenUnits, column
from dlrover.python.rl.algorithm.losses.policy_gradient import GroupRelative, clipped_surrogate


@dataclass(frozen=True)
class GSPO(GroupRelative):
    """The clipped surrogate of ``s = exp(mean over tokens of log pi - log pi_old)`` (eq. 5 to 7); a row is a sequence.

    Each token has its sequence's ratio and its own gradient (GSPO-token, eq. 14), which with one advantage per sequence
    is the gradient of the sequence's ratio."""

    #: how far the sequence's ratio may fall below 1: means over tokens move little (section 5.1)
    clip_low: Annotated[float, Ge(0.0), Lt(1.0)] = 3e-4
    clip_high: Annotated[float, Ge(0.0)] = 4e-4
    averaging: Literal["sequence"] = "sequence"  #: mean over sequences

    @property
    def needs(self) -> Needs:
        """Add the train engine's log-probs: over a sequence, the rollout engine's rounding exceeds the clip range."""
        needs = super().needs
        return replace(needs, loss=needs.loss | {"rollout_logprobs"}, whole_sequences=True)

    def surrogate(self, logprobs: torch.Tensor, columns: TokenColumns) -> TokenLosses:
        units = TokenUnits.of(columns)
        sequence_ratio = units.spread(units.means((logprobs - column(columns, "old_logprobs")).detach()))
        log_ratio = sequence_ratio + (logprobs - logprobs.detach())
        return clipped_surrogate(log_ratio, columns, self.clip_low, self.clip_high, self.dual_clip)
