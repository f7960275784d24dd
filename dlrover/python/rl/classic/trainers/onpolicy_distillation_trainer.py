"""On-policy distillation as a constructor."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from dlrover.python.rl.classic.arguments import Positive, names_arguments
from dlrover.python.rl.classic.envs import Samples
from dlrover.python.rl.classic.running import Recipe
from dlrover.python.rl.classic.sampling_trainer import SamplingTraining
from dlrover.python.rl.classic.saving import SavesSteps
from dlrover.python.rl.recipe.distill import DistillationConfig, DistillationTrainer
from dlrover.python.rl.recipe.workloads import ActorWorkload, RewardWorkload, RolloutWorkload, TeacherWorkload
from dlrover.python.rl.runtime.torchrun.links import Place


@dataclass(frozen=True)
class StepsDistillationConfig(DistillationConfig):
    """Distillation with ``saving_steps``."""

    saving_steps: Positive = 10


class StepsDistillationTrainer(SavesSteps, DistillationTrainer):
    """The recipe, which keeps models on the way."""

    config_class = StepsDistillationConfig


@names_arguments
@dataclass
class OnPolicyDistillationTrainer(SamplingTraining):
    """Lowers the reverse KL to a teacher on the student's own samples: the recipe ``distill``.

    Example::

        OnPolicyDistillationTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct", teacher_model="Qwen/Qwen2.5-1.5B-Instruct", train_dataset=samples
        ).train()

    Samples may have no ``get_reward``: rewards are logged, and nothing is learned from them.

    Raises:
        ValueError: an argument has a value that it cannot have.
        TypeError: there is no such argument; gives the nearest.
    """

    model: str | Path
    """Folder or hub name of the student, a causal language model."""

    teacher_model: str | Path
    """The same of the teacher, whose tokens are the student's."""

    train_dataset: Samples
    """Samples with ``prompt``."""

    _: KW_ONLY

    wandb_project: str = "onpolicy_distill"

    _needs_rewards = False

    def _recipe(self, place: Place) -> Recipe:
        config: dict[str, Any] = self._shared_config(place, samples_per_prompt=1, missing=None)
        clip = {"clip_low": self.clip_eps, "clip_high": self.clip_eps}
        config["algorithm"] = {"name": "distillation", "averaging": "sequence", **clip}
        config["teachers"] = {"teacher": {"model": str(self.teacher_model)}}
        roles = {"actor": ActorWorkload, "rollout": RolloutWorkload, "reward": RewardWorkload}
        return Recipe(StepsDistillationTrainer, {**roles, "teacher": TeacherWorkload}, config, self.folder, self.resume)
