# SPDX-License-Identifier: Apache-2.0
"""Recipes as constructors: ``GRPOTrainer(model=..., train_dataset=..., ...).train()``.

Each name is loaded when it is first used: the process that runs a reward imports ``EnvBase`` without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover.python.rl.classic.constructors import ClassicGRPOTrainer as GRPOTrainer
    from dlrover.python.rl.classic.constructors import ClassicSFTTrainer as SFTTrainer
    from dlrover.python.rl.classic.constructors import OnPolicyDistillationTrainer
    from dlrover.python.rl.classic.envs import (
        AIME2025,
        CapyBaraSFTDataset,
        EnvBase,
        IntellectMathDataset,
        get_boxed_answer,
    )
    from dlrover.python.rl.classic.evaluator import Evaluator
    from dlrover.python.rl.environment.verifiers.arithmetic import MathDataset

_CLASSIC = "dlrover.python.rl.classic"
_SOURCES = {
    "AIME2025": (f"{_CLASSIC}.envs", "AIME2025"),
    "CapyBaraSFTDataset": (f"{_CLASSIC}.envs", "CapyBaraSFTDataset"),
    "EnvBase": (f"{_CLASSIC}.envs", "EnvBase"),
    "Evaluator": (f"{_CLASSIC}.evaluator", "Evaluator"),
    "GRPOTrainer": (f"{_CLASSIC}.constructors", "ClassicGRPOTrainer"),
    "IntellectMathDataset": (f"{_CLASSIC}.envs", "IntellectMathDataset"),
    "MathDataset": ("dlrover.python.rl.environment.verifiers.arithmetic", "MathDataset"),
    "OnPolicyDistillationTrainer": (f"{_CLASSIC}.constructors", "OnPolicyDistillationTrainer"),
    "SFTTrainer": (f"{_CLASSIC}.constructors", "ClassicSFTTrainer"),
    "get_boxed_answer": (f"{_CLASSIC}.envs", "get_boxed_answer"),
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
    if name not in _SOURCES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module, attribute = _SOURCES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
