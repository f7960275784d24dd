# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ (Hu et al., arXiv:2501.03262): no critic; advantages are normalised over the whole update."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le

from dlrover.python.rl.algorithm.losses.columns import SampleView, group_advantages, whiten
from dlrover.python.rl.algorithm.losses.policy_gradient import KLEstimator, KLTerm, PolicyGradient
from dlrover.python.rl.algorithm.losses.values import rewards_to_go
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class ReinforcePlusPlus(PolicyGradient):
    """A token's advantage is its reward-to-go, KL penalties included, whitened over all tokens of the update."""

    compares_samples: ClassVar[bool] = False
    has_token_advantages: ClassVar[bool] = True

    gamma: Annotated[float, Ge(0.0), Le(1.0)] = 1.0  #: discount of later rewards
    kl_estimator: KLEstimator = "k1"
    kl_in: KLTerm = "reward"

    def advantages(self, samples: SampleView) -> Column:
        return samples.ragged(whiten(rewards_to_go(self.token_rewards(samples), samples.lengths, self.gamma)))


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(PolicyGradient):
    """Rewards less their group's mean, whitened over all tokens of the update; for groups of samples."""

    #: estimator of the KL penalty; k2, as in the paper, has the gradient of KL(pi || ref)
    kl_estimator: KLEstimator = "k2"

    def advantages(self, samples: SampleView) -> Column:
        centred = group_advantages(samples.prompt_id, self.rewards(samples), "none", samples.counted)
        counts = np.where(samples.counted, samples.action_tokens, 0)
        return samples.spread(whiten(centred.astype(np.float64), counts))
