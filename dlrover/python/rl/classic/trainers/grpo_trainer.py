# SPDX-License-Identifier: Apache-2.0
"""RLFusion's place of ``GRPOTrainer``."""

from dlrover.python.rl.classic.constructors import ClassicGRPOTrainer as GRPOTrainer

__all__ = ["GRPOTrainer"]
