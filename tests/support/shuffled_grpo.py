# SPDX-License-Identifier: Apache-2.0
"""GRPO whose advantages belong to other samples."""

from dataclasses import dataclass

import numpy as np

from dlrover.python.rl.algorithm.grpo import GRPO


@dataclass(frozen=True)
class ShuffledGRPO(GRPO):
    def advantages(self, samples):
        advantages = super().advantages(samples)
        return np.random.default_rng(len(advantages)).permutation(advantages)
