# SPDX-License-Identifier: Apache-2.0
"""The public names of DLRover RL. Importing it is fast: each name is loaded when it is first used.

Type checkers read ``__init__.pyi``.
"""

import importlib
from typing import Any

_HOMES = {
    "dlrover.python.rl.algorithm.losses.policy_gradient": ("PolicyGradient",),
    "dlrover.python.rl.classic": (
        "EnvBase", "Evaluator", "GRPOTrainer", "MathDataset", "OnPolicyDistillationTrainer", "SFTTrainer",
    ),
    "dlrover.python.rl.common.errors": (
        "DLRoverRLError", "InvalidJob", "InvocationError", "InvocationTimeout", "JobConflict", "JobFailed",
    ),
    "dlrover.python.rl.common.names": ("RLRoleType",),
    "dlrover.python.rl.master.job": ("RLJob", "RLJobBuilder"),
    "dlrover.python.rl.session.engine": ("InferenceEngine", "TrainEngine"),
    "dlrover.python.rl.session.session": ("init", "shutdown"),
    "dlrover.python.rl.session.split": ("NeedParallel",),
    "dlrover.python.rl.trainer.shard": ("Replicate", "Shard"),
    "dlrover.python.rl.trainer.trainer": ("BaseTrainer",),
    "dlrover.python.rl.trainer.workload": ("BaseWorkload", "trainer_invocation"),
    "dlrover.rl.result": ("TrainResult",),
    "dlrover.rl.train": ("train_distill", "train_dpo", "train_grpo", "train_ppo", "train_rm", "train_sft"),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME, "nn"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("dlrover.python.rl.common.names").package_version()
    if name == "nn":
        return importlib.import_module("dlrover.rl.nn")
    if name not in _HOME:
        moved = importlib.import_module("dlrover.python.rl")
        raise moved.no_attribute(__name__, name)
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
