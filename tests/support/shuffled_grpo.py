# SPDX-License-Identifier: Apache-2.0
"""GRPO whose advantages belong to samples of other groups."""

from dataclasses import dataclass

import numpy as np

from dlrover.python.rl.algorithm.grpo import GRPO


@dataclass(frozen=True)
class ShuffledGRPO(GRPO):
    def advantages(self, samples):
        advantages = super().advantages(samples)
        return np.roll(advantages, len(advantages) // 2)  # a fixed permutation may leave some in their places
