# SPDX-License-Identifier: Apache-2.0
"""RLOO: REINFORCE with the mean of the other samples as baseline (Ahmadian et al., arXiv:2402.14740, section 3.2)."""

from dataclasses import dataclass
from typing import Literal

from dlrover.python.rl.algorithm.losses.columns import SampleView, leave_one_out
from dlrover.python.rl.algorithm.losses.policy_gradient import KLEstimator, KLTerm, PolicyGradient
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class RLOO(PolicyGradient):
    """A completion is one action: its reward, less the KL penalty of all its tokens, weights their summed log-prob.

    While the policy is unchanged, the clipped surrogate's gradient is REINFORCE's."""

    #: the mean over samples of their token sums, as in the paper; or a mean over tokens
    averaging: Literal["token", "sequence", "sum"] = "sum"
    kl_estimator: KLEstimator = "k1"
    kl_in: KLTerm = "reward"

    def advantages(self, samples: SampleView) -> Column:
        return samples.spread(leave_one_out(samples.prompt_id, self.rewards(samples), samples.counted))
