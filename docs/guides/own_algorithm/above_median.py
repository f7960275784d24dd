# SPDX-License-Identifier: Apache-2.0
"""Imitate the better half: every sample above its group's median is trained on, the others are not."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Gt, Lt

from dlrover.python.rl.algorithm.losses.columns import SampleView
from dlrover.python.rl.algorithm.losses.policy_gradient import PolicyGradient
from dlrover.python.rl.data.batch import Column


@dataclass(frozen=True)
class AboveMedian(PolicyGradient):
    """Advantage 1 above the group's quantile of rewards, 0 at and below it."""

    quantile: Annotated[float, Gt(0.0), Lt(1.0)] = 0.5
    """Which one; a field is an option of the job file, and what its type forbids is refused before the start."""

    def advantages(self, samples: SampleView) -> Column:
        """``[rows]``, from what is known of the samples: ``prompt_id``, ``reward``, and which of them count."""
        bar = np.full(len(samples.reward), np.inf)
        for prompt in np.unique(samples.prompt_id):
            group = (samples.prompt_id == prompt) & samples.counted
            if group.any():
                bar[group] = np.quantile(samples.reward[group], self.quantile)
        return samples.spread((samples.reward > bar).astype(np.float64))
