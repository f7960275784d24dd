"""RLOO: REINFORCE with the mean of the other samples as baseline (Ahmadian et al., arXiv:2402.14740, section 3.2)."""

from dataclasses import dataclass
from typing import Literal

from dlrover.python.rl.algorithm.advantages import leave_one_out
from dlrover.python.rl.algorithm.kl import KLEstimator
from dlrover.python.rl.algorithm.policy import KLPlace, PolicyGradient
from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class RLOO(PolicyGradient):
    """A completion is one action: its reward, less the KL penalty of all its tokens, counts for their summed log-prob.

    While the policy has not moved the clipped surrogate's gradient is REINFORCE's.
    """

    averaging: Literal["token", "sequence", "sum"] = "sum"
    """Over samples the mean of their token sums, as in the paper; or a mean over tokens."""

    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL penalty; the paper's is k1."""

    kl_in: KLPlace = "reward"
    """Where the KL penalty is."""

    def advantages(self, samples: Samples) -> Column:
        """Rewards less the mean of the group's others: float32 ``[rows]``."""
        return samples.spread(leave_one_out(samples.prompt_id, self.rewards(samples), samples.counted))
