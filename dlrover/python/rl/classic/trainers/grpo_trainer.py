"""Group-relative policy optimisation as a constructor."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from dlrover.python.rl.classic.arguments import Positive, names_arguments
from dlrover.python.rl.classic.envs import Samples
from dlrover.python.rl.classic.running import Recipe
from dlrover.python.rl.classic.sampling_trainer import SamplingTraining
from dlrover.python.rl.classic.saving import SavesSteps
from dlrover.python.rl.recipe import grpo
from dlrover.python.rl.recipe.config import GRPOConfig
from dlrover.python.rl.recipe.workloads import ActorWorkload, ReferenceWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.runtime.torchrun.links import Place

NotNegative = Annotated[float, Ge(0)]


@dataclass(frozen=True)
class StepsGRPOConfig(GRPOConfig):
    """GRPO with ``saving_steps``."""

    saving_steps: Positive = 10


class StepsGRPOTrainer(SavesSteps, grpo.GRPOTrainer):
    """The recipe, which keeps models on the way."""

    config_class = StepsGRPOConfig


@names_arguments
@dataclass
class GRPOTrainer(SamplingTraining):
    """Samples groups of completions, and pushes the policy towards the better ones of each: the recipe ``grpo``.

    Example::

        GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=MathDataset(200), num_steps=100).train()

    The advantage of a sample is its reward less the mean of its prompt's, in standard deviations of its prompt's. A
    sample whose ``get_reward`` fails or takes too long is counted and not trained on.

    Raises:
        ValueError: an argument has a value that it cannot have.
        TypeError: there is no such argument; gives the nearest.
    """

    model: str | Path
    """Folder or hub name of a causal language model."""

    train_dataset: Samples
    """Samples with ``prompt`` and ``get_reward``."""

    _: KW_ONLY

    group_size: Annotated[int, Ge(2)] = 4
    """Completions of each prompt."""

    ppo_steps: Positive = 2
    kl_penalty: NotNegative = 0.0
    """Weight of the KL penalty (k3, in the loss) towards the model that the run begins with."""

    max_error: NotNegative = 100.0
    invalid_penalty: NotNegative = 1.0
    """A completion without any text is worth ``-(max_error + invalid_penalty)``, and ``get_reward`` is not asked."""

    wandb_project: str = "grpo"

    def _recipe(self, place: Place) -> Recipe:
        config = self._shared_config(place, self.group_size, -(self.max_error + self.invalid_penalty))
        clip = {"clip_low": self.clip_eps, "clip_high": self.clip_eps}
        config["algorithm"] = {"name": "grpo", **clip, "kl_coef": self.kl_penalty}
        reference = {"reference": ReferenceWorkload} if self.kl_penalty > 0 else {}
        roles = {"actor": ActorWorkload, "rollout": RolloutWorkload, "reward": RewardWorkload, **reference}
        return Recipe(StepsGRPOTrainer, roles, config, self.folder, self.resume)
