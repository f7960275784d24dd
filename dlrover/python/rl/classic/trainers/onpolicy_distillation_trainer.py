# SPDX-License-Identifier: Apache-2.0
"""RLFusion's place of ``OnPolicyDistillationTrainer``."""

from dlrover.python.rl.classic.constructors import OnPolicyDistillationTrainer

__all__ = ["OnPolicyDistillationTrainer"]
