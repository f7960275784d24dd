"""GRPO: group-relative policy optimisation (DeepSeekMath, Shao et al., arXiv:2402.03300, eq. 3 and 4)."""

from dataclasses import dataclass
from typing import Literal

from dlrover.python.rl.algorithm.advantages import Normalize, group_advantages
from dlrover.python.rl.algorithm.policy import PolicyGradient
from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class GRPO(PolicyGradient):
    """The mean over samples of each one's mean token loss; the advantage is relative to the group.

    The paper's KL penalty is k3 in the loss with ``kl_coef`` 0.04.
    """

    averaging: Literal["token", "sequence"] = "sequence"
    """Mean over tokens, or over sequences of their token means as in the paper."""

    normalize: Normalize = "std"
    """Divide a group's centred rewards by their standard deviation as in the paper, or not."""

    def advantages(self, samples: Samples) -> Column:
        """Rewards less their group's mean, in standard deviations of the group: float32 ``[rows]``."""
        reward = self.rewards(samples)
        return samples.spread(group_advantages(samples.prompt_id, reward, self.normalize, samples.counted))
