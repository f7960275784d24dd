"""Recipes as constructors: ``GRPOTrainer(model=..., train_dataset=..., ...).train()``.

Each name is fetched when it is first used: the process that runs a reward imports ``EnvBase`` without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover.python.rl.classic.datasets import AIME2025, CapyBaraSFTDataset, IntellectMathDataset, MathDataset
    from dlrover.python.rl.classic.envs import EnvBase, get_boxed_answer
    from dlrover.python.rl.classic.evaluator import Evaluator
    from dlrover.python.rl.classic.trainers.grpo_trainer import GRPOTrainer
    from dlrover.python.rl.classic.trainers.onpolicy_distillation_trainer import OnPolicyDistillationTrainer
    from dlrover.python.rl.classic.trainers.sft_trainer import SFTTrainer

_HOME = {
    "AIME2025": "datasets",
    "CapyBaraSFTDataset": "datasets",
    "EnvBase": "envs",
    "Evaluator": "evaluator",
    "GRPOTrainer": "trainers.grpo_trainer",
    "IntellectMathDataset": "datasets",
    "MathDataset": "datasets",
    "OnPolicyDistillationTrainer": "trainers.onpolicy_distillation_trainer",
    "SFTTrainer": "trainers.sft_trainer",
    "get_boxed_answer": "envs",
}

__all__ = [
    "AIME2025",
    "CapyBaraSFTDataset",
    "EnvBase",
    "Evaluator",
    "GRPOTrainer",
    "IntellectMathDataset",
    "MathDataset",
    "OnPolicyDistillationTrainer",
    "SFTTrainer",
    "get_boxed_answer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
