# SPDX-License-Identifier: Apache-2.0
"""GRPO, and the base class of trainers on sampled completions: RLFusion's arguments for the recipe ``grpo``."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from dlrover.python.rl.classic.envs import SampleDataset, load_samples, write_samples
from dlrover.python.rl.classic.evaluator import Positive, PositiveNumber, names_arguments, sampling_params
from dlrover.python.rl.classic.trainers import ClassicTrainer
from dlrover.python.rl.recipe import grpo
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv


@dataclass(frozen=True, kw_only=True)
class ClassicPolicyTrainer(ClassicTrainer):
    """The arguments of trainers on sampled completions."""

    needs_rewards: ClassVar[bool] = True

    if TYPE_CHECKING:  # its position differs between trainers
        train_dataset: SampleDataset

    ppo_steps: Positive = 1
    """Training passes over the samples of a step."""

    clip_eps: PositiveNumber = 0.2
    """Clip the ratio to the policy that generated a sample to this distance from 1."""

    log_completions: bool = False
    """Log every sample of a step; ``samples.jsonl`` has all of them too."""

    max_log_chars: Positive = 320
    """Characters of each text that are logged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.do_sample:
            raise ValueError("do_sample=False generates the same completion each time, which teaches nothing")

    def test(
        self,
        dataset: SampleDataset | None = None,
        num_batches: int | None = None,
        step: int | None = None,
        eval_temperature: float | None = None,
    ) -> dict[str, Any]:
        """Evaluate the trained model, or before ``train`` the initial one, in the main process; others return {}.

        Args:
            dataset: ``eval_dataset`` by default.
            num_batches: batches of ``batch_size`` samples; None: all.
            step: evaluate the saved model of this step.
            eval_temperature: ``sampling_temperature`` by default.
        """
        if self._read_launch().rank:
            return {}
        samples = self._test_dataset(dataset)
        temperature = self.sampling_temperature if eval_temperature is None else eval_temperature
        options = {"sampling_temperature": temperature, "num_batches": num_batches}
        return self._evaluate(self.model_after(step), samples, **options)

    def _recipe_config(self, launch: LaunchEnv) -> dict[str, Any]:
        train = load_samples(self.train_dataset, "train_dataset", rewards=self.needs_rewards)
        file = write_samples(self.folder / "data", "train", train, scored=True)
        # The recipe evaluates before and after training; without an eval_dataset, on a few training samples.
        splits, evaluation = {"train": train}, {"data.eval": file, "data.eval_rows": launch.world_size}
        if self.eval_dataset is not None:
            splits["eval"] = load_samples(self.eval_dataset, "eval_dataset", rewards=self.needs_rewards)
            held_out = write_samples(self.folder / "data", "eval", splits["eval"], scored=True)
            evaluation = {"data.eval": held_out, "data.eval_rows": len(splits["eval"])}
        sampling = sampling_params(self.max_new_tokens, self.sampling_temperature, self.generation_args)
        prompts = self.batch_size * launch.world_size
        return {
            "data.train": file,
            **evaluation,
            "prompts_per_step": prompts,
            "reward": self._reward(splits, self._empty_reward()),
            **{f"rollout.{key}": getattr(sampling, key) for key in ("max_new_tokens", "temperature", "top_k", "top_p")},
            "rollout.stop": list(sampling.stop),
            "log.show_samples": prompts * getattr(self, "group_size", 1) if self.log_completions else 0,
            "log.max_chars": self.max_log_chars,
        }

    def _empty_reward(self) -> float | None:
        return None


@names_arguments
@dataclass(frozen=True)
class ClassicGRPOTrainer(ClassicPolicyTrainer):
    """Trains on groups of completions, and reinforces the better ones of each group: the recipe ``grpo``.

    Example::

        GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=MathDataset(200), num_steps=100).train()

    The advantage of a sample is its reward minus the group's mean, divided by the group's standard deviation. A sample
    whose ``get_reward`` fails or takes too long is counted and not trained on.
    """

    recipe = grpo.GRPOTrainer

    train_dataset: SampleDataset
    """Samples with ``prompt`` and ``get_reward``."""

    _: KW_ONLY

    group_size: Annotated[int, Ge(2)] = 4
    ppo_steps: Positive = 2
    kl_penalty: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL penalty (k3, in the loss) towards the initial model."""

    max_error: Annotated[float, Ge(0)] | None = None
    """If set, an empty completion has the reward ``-(max_error + invalid_penalty)``, without ``get_reward``."""

    invalid_penalty: Annotated[float, Ge(0)] = 1.0

    wandb_project: str = "grpo"

    def _roles(self) -> Sequence[str]:
        return ("reference",) if self.kl_penalty > 0 else ()

    def _recipe_config(self, launch: LaunchEnv) -> dict[str, Any]:
        return {**super()._recipe_config(launch), "algorithm.name": "grpo"}

    def _empty_reward(self) -> float | None:
        return None if self.max_error is None else -(self.max_error + self.invalid_penalty)


GRPOTrainer = ClassicGRPOTrainer
