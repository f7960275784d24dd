"""What the trainers on samples have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dlrover.python.rl.classic.arguments import Positive, PositiveNumber, sampling_of
from dlrover.python.rl.classic.envs import Samples, take
from dlrover.python.rl.classic.evaluator import Evaluator
from dlrover.python.rl.classic.rewards import reward_function, write_rows
from dlrover.python.rl.classic.running import Told, place_of
from dlrover.python.rl.classic.training import DATA, Training
from dlrover.python.rl.runtime.torchrun.links import Place


@dataclass(kw_only=True)
class SamplingTraining(Training):
    """Their arguments, and what these are in a recipe's configuration."""

    if TYPE_CHECKING:  # each trainer says where among its arguments
        train_dataset: Samples

    batch_size: Positive = 1
    """Prompts of a step."""

    max_new_tokens: Positive = 1024
    ppo_steps: Positive = 1
    """Passes over the samples of a step."""

    clip_eps: PositiveNumber = 0.2
    """How far the ratio to the policy that drew a sample may be from 1."""

    log_completions: bool = False
    """Log completions beside the figures; ``samples.jsonl`` has all of them."""

    max_log_chars: Positive = 320
    """Characters of each that are logged."""

    reward_timeout_s: PositiveNumber = 30.0
    """Seconds that ``get_reward`` may take; a sample that takes longer counts as failed, and is not trained on."""

    _needs_rewards = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.do_sample:
            raise ValueError("do_sample=False draws the same completion each time: there is nothing to learn from that")

    def test(
        self,
        dataset: Samples | None = None,
        num_batches: int | None = None,
        step: int | None = None,
        eval_temperature: float | None = None,
    ) -> dict[str, Any]:
        """Evaluate the trained model, or before ``train`` the one that it begins with; on the main process.

        Args:
            dataset: ``eval_dataset`` by default.
            num_batches: batches of ``batch_size`` samples; None: all.
            step: evaluate the model of this step, which has been saved.
            eval_temperature: ``sampling_temperature`` by default.

        Returns:
            What ``Evaluator.evaluate`` does, whose files are in ``output_dir/evaluation``; nothing elsewhere than
            on the main process.
        """
        if place_of(self.use_accelerate).rank:
            return {}
        samples = self.eval_dataset if dataset is None else dataset
        if samples is None:
            raise ValueError("test() needs a dataset: there is no eval_dataset")
        evaluator = Evaluator(
            self.model_after(step),
            samples,
            self.folder / "evaluation",
            generation_args=self.generation_args,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            sampling_temperature=self.sampling_temperature if eval_temperature is None else eval_temperature,
            num_batches=num_batches,
            reward_timeout_s=self.reward_timeout_s,
        )
        try:
            return evaluator.evaluate()
        finally:
            evaluator.close()

    def _told(self) -> Told:
        return replace(super()._told(), characters=self.max_log_chars if self.log_completions else None)

    def _shared_config(self, place: Place, samples_per_prompt: int, missing: float | None) -> dict[str, Any]:
        drawn = sampling_of(self.max_new_tokens, self.sampling_temperature, self.generation_args)
        rollout = {"samples_per_prompt": samples_per_prompt, **self._further(drawn)}
        return {
            "model": str(self.model),
            "data": self._data(place, missing),
            "steps": self.num_steps,
            "epochs": self.ppo_steps,
            "prompts_per_step": self.batch_size * place.world_size,
            "seed": self.seed,
            "eval_every": self.eval_steps or 0,
            "optimizer": self._optimizer(),
            "rollout": rollout,
            "reward": {"function": reward_function(self.folder / DATA), "timeout_s": self.reward_timeout_s},
            "engine": self._engine(),
            "saving_steps": self.saving_steps,
        }

    def _further(self, drawn: Any) -> Mapping[str, Any]:
        told = {"max_new_tokens": drawn.max_new_tokens, "temperature": drawn.temperature}
        return {**told, "top_k": drawn.top_k, "top_p": drawn.top_p, "stop": list(drawn.stop)}

    def _data(self, place: Place, missing: float | None) -> dict[str, Any]:
        folder = self.folder / DATA
        for left in folder.glob("*.environments"):
            left.unlink()
        train = take(self.train_dataset, "train_dataset", rewards=self._needs_rewards)
        path = str(write_rows(folder, "train", train, missing))
        if self.eval_dataset is None:
            # The recipe evaluates before and after; without samples for that, on a few of the training ones.
            return {"train": path, "eval": path, "eval_rows": place.world_size}
        held_out = take(self.eval_dataset, "eval_dataset", rewards=self._needs_rewards)
        return {"train": path, "eval": str(write_rows(folder, "eval", held_out, missing)), "eval_rows": len(held_out)}
