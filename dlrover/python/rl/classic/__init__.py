# SPDX-License-Identifier: Apache-2.0
"""Recipes as constructors: ``GRPOTrainer(model=..., train_dataset=..., ...).train()``.

Each name is loaded when it is first used, so that a reward's process imports ``EnvBase`` without torch.
Type checkers read ``__init__.pyi``.
"""

import importlib
from typing import Any

_MODULES = {
    **dict.fromkeys(("AIME2025", "CapyBaraSFTDataset", "IntellectMathDataset", "MathDataset"), "datasets"),
    **dict.fromkeys(("EnvBase", "get_boxed_answer"), "envs"),
    "Evaluator": "evaluator",
    "GRPOTrainer": "trainers.grpo_trainer",
    "OnPolicyDistillationTrainer": "trainers.onpolicy_distillation_trainer",
    "SFTTrainer": "trainers.sft_trainer",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
