# SPDX-License-Identifier: Apache-2.0
"""RLFusion's place of its data sets."""

from dlrover.python.rl.classic.envs import AIME2025, CapyBaraSFTDataset, IntellectMathDataset
from dlrover.python.rl.environment.verifiers.arithmetic import MathDataset

__all__ = ["AIME2025", "CapyBaraSFTDataset", "IntellectMathDataset", "MathDataset"]
