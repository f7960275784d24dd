# SPDX-License-Identifier: Apache-2.0
"""RLFusion's place of ``SFTTrainer``."""

from dlrover.python.rl.classic.constructors import ClassicSFTTrainer as SFTTrainer

__all__ = ["SFTTrainer"]
