# SPDX-License-Identifier: Apache-2.0
from dlrover.python.rl.classic.datasets import AIME2025 as AIME2025
from dlrover.python.rl.classic.datasets import CapyBaraSFTDataset as CapyBaraSFTDataset
from dlrover.python.rl.classic.datasets import IntellectMathDataset as IntellectMathDataset
from dlrover.python.rl.classic.datasets import MathDataset as MathDataset
from dlrover.python.rl.classic.envs import EnvBase as EnvBase
from dlrover.python.rl.classic.envs import get_boxed_answer as get_boxed_answer
from dlrover.python.rl.classic.evaluator import Evaluator as Evaluator
from dlrover.python.rl.classic.trainers.grpo_trainer import GRPOTrainer as GRPOTrainer
from dlrover.python.rl.classic.trainers.onpolicy_distillation_trainer import (
    OnPolicyDistillationTrainer as OnPolicyDistillationTrainer,
)
from dlrover.python.rl.classic.trainers.sft_trainer import SFTTrainer as SFTTrainer
