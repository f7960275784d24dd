"""REINFORCE++ (Hu et al., arXiv:2501.03262): no critic; advantages are normalised over the whole update."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le

from dlrover.python.rl.algorithm.advantages import group_advantages, whitened
from dlrover.python.rl.algorithm.gae import rewards_to_go
from dlrover.python.rl.algorithm.kl import KLEstimator
from dlrover.python.rl.algorithm.policy import KLPlace, PolicyGradient
from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class ReinforcePlusPlus(PolicyGradient):
    """A token's advantage is what is still to come, KL penalties included, whitened over all tokens of the update."""

    compares_samples: ClassVar[bool] = False
    judges_tokens: ClassVar[bool] = True

    gamma: Annotated[float, Ge(0.0), Le(1.0)] = 1.0
    """Discount of later rewards."""

    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL penalty; the paper's is k1."""

    kl_in: KLPlace = "reward"
    """Where the KL penalty is."""

    def advantages(self, samples: Samples) -> Column:
        """Ragged float32 ``[rows, seq]``."""
        tokens = samples.tokens
        return tokens.ragged(whitened(rewards_to_go(self.token_rewards(samples), tokens.lengths, self.gamma)))


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(PolicyGradient):
    """Rewards less their group's mean, whitened over all tokens of the update; for groups of samples."""

    kl_estimator: KLEstimator = "k2"
    """Estimator of the KL penalty; the paper's is k2, whose gradient is that of KL(pi || ref)."""

    def advantages(self, samples: Samples) -> Column:
        """Float32 ``[rows]``."""
        centred = group_advantages(samples.prompt_id, self.rewards(samples), "none", samples.counted)
        counts = np.where(samples.counted, samples.action_tokens, 0)
        return samples.spread(whitened(centred.astype(np.float64), counts))
