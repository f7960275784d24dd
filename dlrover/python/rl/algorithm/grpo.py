# SPDX-License-Identifier: Apache-2.0
"""GRPO: group-relative policy optimisation (DeepSeekMath, Shao et al., arXiv:2402.03300, eq. 3 and 4)."""

from dataclasses import dataclass
from typing import Literal

from dlrover.python.rl.algorithm.losses.policy_gradient import GroupRelative


@dataclass(frozen=True)
class GRPO(GroupRelative):
    """Mean over samples of their mean token losses. The paper's KL penalty is k3 in the loss, ``kl_coef`` 0.04."""

    #: mean over tokens, or, as in the paper, over sequences of their token means
    averaging: Literal["token", "sequence"] = "sequence"
