# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: RLFusion's arguments for the recipe ``distill``."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from dlrover.python.rl.classic.envs import SampleDataset
from dlrover.python.rl.classic.evaluator import names_arguments
from dlrover.python.rl.classic.trainers.grpo_trainer import ClassicPolicyTrainer
from dlrover.python.rl.recipe.distill import DistillationTrainer
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv


@names_arguments
@dataclass(frozen=True)
class OnPolicyDistillationTrainer(ClassicPolicyTrainer):
    """Lowers the reverse KL to a teacher on the student's own samples: the recipe ``distill``.

    Example::

        OnPolicyDistillationTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct", teacher_model="Qwen/Qwen2.5-1.5B-Instruct", train_dataset=samples
        ).train()

    Samples need no ``get_reward``; rewards are only logged.
    """

    recipe = DistillationTrainer
    needs_rewards = False

    teacher_model: str | Path
    """Folder or hub name of the teacher, which must have the student's vocabulary."""

    train_dataset: SampleDataset
    """Samples with ``prompt``."""

    _: KW_ONLY

    wandb_project: str = "onpolicy_distill"

    def _recipe_config(self, launch: LaunchEnv) -> dict[str, Any]:
        return {
            **super()._recipe_config(launch),
            "algorithm.name": "distillation",
            "algorithm.averaging": "sequence",
            "teachers": {"teacher": {"model": str(self.teacher_model)}},
        }
