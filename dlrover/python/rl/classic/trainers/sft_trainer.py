"""Supervised fine-tuning as a constructor."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig

from dlrover.python.rl.classic.arguments import Positive, names_arguments
from dlrover.python.rl.classic.envs import Samples, Taken, take
from dlrover.python.rl.classic.evaluator import Evaluator
from dlrover.python.rl.classic.rewards import reward_function, write_examples, write_rows
from dlrover.python.rl.classic.running import Recipe, place_of
from dlrover.python.rl.classic.sampled_sft import StepsSFTTrainer
from dlrover.python.rl.classic.training import DATA, Training
from dlrover.python.rl.data.examples import Encoding, encode_sft, sft_rows
from dlrover.python.rl.engine.base import Rendezvous
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.engine.registry import TRAIN, engine_class
from dlrover.python.rl.recipe.config import EngineConfig
from dlrover.python.rl.recipe.members import train_settings
from dlrover.python.rl.recipe.workloads import ActorWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.runtime.torchrun.links import Place
from dlrover.python.rl.trainer.workload import BaseWorkload

_NO_LIMIT = 1 << 20


@names_arguments
@dataclass
class SFTTrainer(Training):
    """Teaches a model the assistant's part of conversations: the recipe ``sft``.

    Example::

        SFTTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=samples, num_steps=100).train()

    Every row is trained on once before any is for the second time. ``output_dir`` holds ``metrics.jsonl``,
    ``step_<number>/`` and ``final/``.

    Raises:
        ValueError: an argument has a value that it cannot have.
        TypeError: there is no such argument; gives the nearest.
    """

    model: str | Path
    """Folder or hub name of a causal language model."""

    train_dataset: Samples
    """Samples with ``prompt`` and ``answer``, which is the assistant's last message."""

    _: KW_ONLY

    batch_size: Positive = 8
    eval_sample_completions: bool = False
    """Evaluate by the rewards of completions that are drawn, besides cross-entropy and perplexity."""

    max_new_tokens: Positive = 256
    wandb_project: str = "sft"
    max_seq_len: Positive | None = None
    """Rows of more tokens are left out; None: what the model allows."""

    mask_prompt: bool = True
    """False trains prompts too."""

    assistant_loss_mode: Literal["all", "last"] = "all"
    """Which assistant turns are trained."""

    reward_timeout_s: float = 30.0
    """Seconds that ``get_reward`` may take."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_sample_completions and self.eval_dataset is None:
            raise ValueError("eval_sample_completions needs an eval_dataset")

    def test(self, dataset: Samples | None = None, num_batches: int | None = None) -> dict[str, Any]:
        """Evaluate the trained model, or before ``train`` the one that it begins with; on the main process.

        Args:
            dataset: ``eval_dataset`` by default.
            num_batches: batches of ``batch_size`` samples; None: all.

        Returns:
            ``ce_loss``, the mean over all labelled tokens, and ``perplexity``; with ``eval_sample_completions`` also
            what ``Evaluator.evaluate`` gives, whose files are in ``output_dir/evaluation``. Nothing elsewhere than
            on the main process.
        """
        if place_of(self.use_accelerate).rank:
            return {}
        samples = self.eval_dataset if dataset is None else dataset
        if samples is None:
            raise ValueError("test() needs a dataset: there is no eval_dataset")
        taken = take(samples, "dataset", rewards=self.eval_sample_completions, answers=True)
        if num_batches is not None:
            taken = taken[: num_batches * self.batch_size]
        loss = self._cross_entropy(taken)
        told = {"ce_loss": loss, "perplexity": math.exp(loss)}
        return told | self._sampled([item.environment for item in taken]) if self.eval_sample_completions else told

    def _cross_entropy(self, taken: Sequence[Taken]) -> float:
        engine = EngineConfig(**self._engine())
        settings = train_settings(engine, engine.device, ParallelSizes())
        judge = engine_class(TRAIN, engine.train)(self.model_after(), None, settings, Rendezvous())
        rows = sft_rows([{"prompt": item.prompt, "answer": item.answer} for item in taken], "dataset")
        batch, _ = encode_sft(rows, judge.tokenizer, self._encoding())
        batch = batch.select("tokens", "action_mask")
        logprobs = judge.evaluate(batch).ragged("logprobs").values[batch.ragged("action_mask").values]
        return -float(logprobs.mean(dtype="float64"))

    def _sampled(self, samples: Samples) -> dict[str, Any]:
        evaluator = Evaluator(
            self.model_after(),
            samples,
            self.folder / "evaluation",
            generation_args=self.generation_args,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            do_sample=self.do_sample,
            sampling_temperature=self.sampling_temperature,
            reward_timeout_s=self.reward_timeout_s,
        )
        try:
            return evaluator.evaluate()
        finally:
            evaluator.close()

    def _encoding(self) -> Encoding:
        longest = self.max_seq_len or _longest(self.model)
        return Encoding(longest, "drop", self.assistant_loss_mode, self.mask_prompt)

    def _recipe(self, place: Place) -> Recipe:
        roles: dict[str, type[BaseWorkload]] = {"actor": ActorWorkload}
        sampled = self._sampled_config() if self.eval_sample_completions else None
        if sampled is not None:
            roles |= {"rollout": RolloutWorkload, "reward": RewardWorkload}
        config = {
            "model": str(self.model),
            "data": self._data(),
            "steps": self.num_steps,
            "batch_size": self.batch_size * place.world_size,
            "seed": self.seed,
            "eval_every": self.eval_steps or 0,
            "optimizer": self._optimizer(),
            "engine": self._engine(),
            "saving_steps": self.saving_steps,
            "sampled": sampled,
        }
        return Recipe(StepsSFTTrainer, roles, config, self.folder, self.resume)

    def _data(self) -> dict[str, Any]:
        encoding, folder = self._encoding(), self.folder / DATA
        train = take(self.train_dataset, "train_dataset", answers=True)
        held_out = None
        if self.eval_dataset is not None:
            held_out = str(write_examples(folder, "eval", take(self.eval_dataset, "eval_dataset", answers=True)))
        return {
            "train": str(write_examples(folder, "train", train)),
            "eval": held_out,
            "max_length": encoding.max_length,
            "over_long": encoding.over_long,
            "assistant": encoding.assistant,
            "mask_prompt": encoding.mask_prompt,
        }

    def _sampled_config(self) -> dict[str, Any]:
        assert self.eval_dataset is not None, "checked"
        taken = take(self.eval_dataset, "eval_dataset", rewards=True)
        return {
            "prompts": str(write_rows(self.folder / DATA, "eval_prompts", taken)),
            "reward": {"function": reward_function(self.folder / DATA), "timeout_s": self.reward_timeout_s},
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.sampling_temperature if self.do_sample else 0.0,
        }


def _longest(model: str | Path) -> int:
    """Tokens of a sequence at most, as the model says."""
    config = AutoConfig.from_pretrained(str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model)
    return getattr(config.get_text_config(), "max_position_embeddings", None) or _NO_LIMIT
