"""GSPO: ratios of whole sequences, since rewards are of whole sequences (Zheng et al., arXiv:2507.18071)."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt

from dlrover.python.rl.algorithm.advantages import Normalize, group_advantages
from dlrover.python.rl.algorithm.base import TokenColumns, TokenLosses, column
from dlrover.python.rl.algorithm.policy import PolicyGradient
from dlrover.python.rl.algorithm.policy_loss import clipped_surrogate
from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.algorithm.units import Units
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class GSPO(PolicyGradient):
    """The clipped surrogate of ``s = exp(mean over tokens of log pi - log pi_old)`` (eq. 5 to 7), a sequence a row.

    A token's ratio has the value of its sequence's, and its own gradient (GSPO-token, eq. 14): with one advantage for
    the whole sequence that is the gradient of the sequence's.
    """

    clip_low: Annotated[float, Ge(0.0), Lt(1.0)] = 3e-4
    """How far the sequence's ratio may fall below 1: means over tokens move little (section 5.1)."""

    clip_high: Annotated[float, Ge(0.0)] = 4e-4
    """How far it may rise above 1."""

    averaging: Literal["sequence"] = "sequence"
    """Mean over sequences."""

    normalize: Normalize = "std"
    """Divide a group's centred rewards by their standard deviation as in the paper, or not."""

    def advantages(self, samples: Samples) -> Column:
        """Rewards less their group's mean, in standard deviations of the group: float32 ``[rows]``."""
        reward = self.rewards(samples)
        return samples.spread(group_advantages(samples.prompt_id, reward, self.normalize, samples.counted))

    def surrogate(self, logprobs: torch.Tensor, columns: TokenColumns) -> TokenLosses:
        """Of the sequences' ratios; all metrics are of sequences."""
        units = Units.of(columns)
        of_sequence = units.spread(units.means((logprobs - column(columns, "old_logprobs")).detach()))
        log_ratio = of_sequence + (logprobs - logprobs.detach())
        return clipped_surrogate(log_ratio, columns, self.clip_low, self.clip_high, self.dual_clip)
