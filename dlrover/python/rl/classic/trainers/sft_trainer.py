# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: RLFusion's arguments for the recipe ``sft``."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from dlrover.python.rl.classic.envs import SampleDataset, load_samples, write_samples
from dlrover.python.rl.classic.evaluator import Positive, names_arguments
from dlrover.python.rl.classic.trainers import ClassicTrainer
from dlrover.python.rl.data.conversation import Encoding, collect_sft, encode_sft
from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_class
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.model.loading import read_eos_ids
from dlrover.python.rl.recipe import sft
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import train_settings
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv

_NO_LIMIT = 1 << 20


@names_arguments
@dataclass(frozen=True)
class ClassicSFTTrainer(ClassicTrainer):
    """Trains a model on the assistant's part of conversations: the recipe ``sft``.

    Example::

        SFTTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=samples, num_steps=100).train()

    Every row is used once before any row is used again. ``output_dir`` holds ``metrics.jsonl``,
    ``step_<number>/`` and ``final/``.
    """

    recipe = sft.SFTTrainer

    train_dataset: SampleDataset
    """Samples with ``prompt`` and ``answer``, the assistant's last message."""

    _: KW_ONLY

    batch_size: Positive = 8
    eval_sample_completions: bool = False
    """Also evaluate the rewards of generated completions, besides cross-entropy and perplexity."""

    max_new_tokens: Positive = 256
    wandb_project: str = "sft"
    max_seq_len: Positive | None = None
    """Rows with more tokens are dropped; None: the model's limit."""

    mask_prompt: bool = True
    """False: train on the prompts too."""

    assistant_loss_mode: Literal["all", "last"] = "all"
    """The assistant's turns to train on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_sample_completions and self.eval_dataset is None:
            raise ValueError("eval_sample_completions needs an eval_dataset")

    def test(self, dataset: SampleDataset | None = None, num_batches: int | None = None) -> dict[str, Any]:
        """Evaluate the trained model, or before ``train`` the initial one, in the main process.

        Args:
            dataset: ``eval_dataset`` by default.
            num_batches: batches of ``batch_size`` samples; None: all.

        Returns:
            ``ce_loss``, the mean over all labelled tokens, and ``perplexity``; with ``eval_sample_completions`` also
            the metrics of ``Evaluator.evaluate``. Empty in other processes.
        """
        if self._read_launch().rank:
            return {}
        rewards = self.eval_sample_completions
        samples = load_samples(self._test_dataset(dataset), "dataset", rewards=rewards, answers=True)
        if num_batches is not None:
            samples = samples[: num_batches * self.batch_size]
        config = EngineConfig(**(self.engine or {}), mask_unknown_ids=False).resolve(torch.cuda.is_available())
        settings = train_settings(config, config.device, ParallelSizes())
        engine = engine_class(TRAIN_ENGINES, config.train)(self.model_after(), None, settings, Rendezvous())
        rows = collect_sft([{"prompt": sample.prompt, "answer": sample.answer} for sample in samples], "dataset")
        eos_ids = read_eos_ids(self.model, engine.tokenizer)
        encoding = Encoding(self._max_length(), "drop", self.assistant_loss_mode, self.mask_prompt, eos_ids)
        batch = encode_sft(rows, engine.tokenizer, encoding)[0].select("tokens", "action_mask")
        logprobs = engine.evaluate(batch).ragged("logprobs").values[batch.ragged("action_mask").values]
        loss = -float(logprobs.mean(dtype="float64"))
        metrics = {"ce_loss": loss, "perplexity": math.exp(loss)}
        if not self.eval_sample_completions:
            return metrics
        sampling = {"do_sample": self.do_sample, "sampling_temperature": self.sampling_temperature}
        environments = [sample.environment for sample in samples]
        return metrics | self._evaluate(self.model_after(), environments, **sampling)

    def _max_length(self) -> int:
        if self.max_seq_len:
            return self.max_seq_len
        folder = Path(self.model).expanduser()
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else self.model)
        return getattr(config.get_text_config(), "max_position_embeddings", None) or _NO_LIMIT

    def _roles(self) -> Sequence[str]:
        return ("rollout", "reward") if self.eval_sample_completions else ()

    def _recipe_config(self, launch: LaunchEnv) -> dict[str, Any]:
        train = load_samples(self.train_dataset, "train_dataset", answers=True)
        config = {
            "batch_size": self.batch_size * launch.world_size,
            "data.max_length": self._max_length(),
            "data.over_long": "drop",
            "data.train": write_samples(self.folder / "data", "train", train),
        }
        if self.eval_dataset is None:
            return config
        held_out = load_samples(self.eval_dataset, "eval_dataset", rewards=self.eval_sample_completions, answers=True)
        file = write_samples(self.folder / "data", "eval", held_out, scored=self.eval_sample_completions)
        config["data.eval"] = file
        if self.eval_sample_completions:
            config["answers"] = {
                "prompts": file,
                "rows": len(held_out),
                "reward": self._reward({"eval": held_out}),
                "max_new_tokens": self.max_new_tokens,
                "temperature": self.sampling_temperature if self.do_sample else 0.0,
            }
        return config


SFTTrainer = ClassicSFTTrainer
