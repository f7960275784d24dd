# SPDX-License-Identifier: Apache-2.0
"""RLFusion's trainers: the arguments of each, and how they become the configuration of its recipe."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from transformers import AutoConfig

from dlrover.python.rl.classic.envs import LoadedSample, SampleDataset, load_samples
from dlrover.python.rl.classic.rewards import remove_environments, write_samples
from dlrover.python.rl.classic.settings import (
    NonNegativeNumber,
    Positive,
    PositiveNumber,
    names_arguments,
    sampling_params,
)
from dlrover.python.rl.classic.training import ClassicTrainer
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.conversation import Encoding, collect_sft, encode_sft
from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_class
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.model.loading import read_eos_ids
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import train_settings
from dlrover.python.rl.recipe.distill import DistillationTrainer
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.sft import SFTTrainer
from dlrover.python.rl.recipe.workloads import (
    ActorWorkload,
    ReferenceWorkload,
    RewardWorkload,
    RolloutWorkload,
    TeacherWorkload,
)
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv
from dlrover.python.rl.trainer.trainer import StepReport
from dlrover.python.rl.trainer.workload import BaseWorkload

_LOG = get_logger(__name__)

_NO_LIMIT = 1 << 20
_SAMPLED_ROLES: Mapping[str, type[BaseWorkload]] = {
    "actor": ActorWorkload,
    "rollout": RolloutWorkload,
    "reward": RewardWorkload,
}


@names_arguments
@dataclass
class ClassicSFTTrainer(ClassicTrainer):
    """Teaches a model the assistant's part of conversations: the recipe ``sft``.

    Example::

        SFTTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=samples, num_steps=100).train()

    Every row is trained on once before any is for the second time. ``output_dir`` holds ``metrics.jsonl``,
    ``step_<number>/`` and ``final/``.
    """

    recipe = SFTTrainer

    train_dataset: SampleDataset
    """Samples with ``prompt`` and ``answer``, which is the assistant's last message."""

    _: KW_ONLY

    batch_size: Positive = 8
    eval_sample_completions: bool = False
    """Evaluate by the rewards of generated completions, besides cross-entropy and perplexity."""

    max_new_tokens: Positive = 256
    wandb_project: str = "sft"
    max_seq_len: Positive | None = None
    """Rows of more tokens are left out; None: what the model allows."""

    mask_prompt: bool = True
    """False trains prompts too."""

    assistant_loss_mode: Literal["all", "last"] = "all"
    """Which assistant turns are trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_sample_completions and self.eval_dataset is None:
            raise ValueError("eval_sample_completions needs an eval_dataset")

    def test(self, dataset: SampleDataset | None = None, num_batches: int | None = None) -> dict[str, Any]:
        """Evaluate the trained model, or before ``train`` the one that it begins with; on the main process.

        Args:
            dataset: ``eval_dataset`` by default.
            num_batches: batches of ``batch_size`` samples; None: all.

        Returns:
            ``ce_loss``, the mean over all labelled tokens, and ``perplexity``; with ``eval_sample_completions`` also
            the metrics of ``Evaluator.evaluate``, with its files in ``output_dir/evaluation``. Empty elsewhere.
        """
        if self._read_launch().rank:
            return {}
        samples = load_samples(
            self._test_dataset(dataset), "dataset", rewards=self.eval_sample_completions, answers=True
        )
        if num_batches is not None:
            samples = samples[: num_batches * self.batch_size]
        loss = self._cross_entropy(samples)
        metrics = {"ce_loss": loss, "perplexity": math.exp(loss)}
        if not self.eval_sample_completions:
            return metrics
        sampling = {"do_sample": self.do_sample, "sampling_temperature": self.sampling_temperature}
        environments = [sample.environment for sample in samples]
        return metrics | self._evaluate(self.model_after(), environments, **sampling)

    def _cross_entropy(self, samples: Sequence[LoadedSample]) -> float:
        config = EngineConfig(**self._engine(), mask_unknown_ids=False).resolve(torch.cuda.is_available())
        settings = train_settings(config, config.device, ParallelSizes())
        engine = engine_class(TRAIN_ENGINES, config.train)(self.model_after(), None, settings, Rendezvous())
        rows = collect_sft([{"prompt": sample.prompt, "answer": sample.answer} for sample in samples], "dataset")
        eos_ids = read_eos_ids(self.model, engine.tokenizer)
        encoding = Encoding(self._max_length(), "drop", self.assistant_loss_mode, self.mask_prompt, eos_ids)
        batch = encode_sft(rows, engine.tokenizer, encoding)[0].select("tokens", "action_mask")
        logprobs = engine.evaluate(batch).ragged("logprobs").values[batch.ragged("action_mask").values]
        return -float(logprobs.mean(dtype="float64"))

    def _max_length(self) -> int:
        if self.max_seq_len:
            return self.max_seq_len
        folder = Path(self.model).expanduser()
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else self.model)
        return getattr(config.get_text_config(), "max_position_embeddings", None) or _NO_LIMIT

    def _roles(self) -> Mapping[str, type[BaseWorkload]]:
        return _SAMPLED_ROLES if self.eval_sample_completions else {"actor": ActorWorkload}

    def _config(self, launch: LaunchEnv) -> dict[str, Any]:
        train = load_samples(self.train_dataset, "train_dataset", answers=True)
        config = {
            "batch_size": self.batch_size * launch.world_size,
            "data.max_length": self._max_length(),
            "data.over_long": "drop",
            "data.train": str(write_samples(self._data_folder, "train", train)),
        }
        if self.eval_dataset is None:
            return config
        held_out = load_samples(self.eval_dataset, "eval_dataset", rewards=self.eval_sample_completions, answers=True)
        file = str(write_samples(self._data_folder, "eval", held_out, rewards=self.eval_sample_completions))
        config["data.eval"] = file
        if self.eval_sample_completions:
            config["answers"] = {
                "prompts": file,
                "rows": len(held_out),
                "reward": self._reward(),
                "max_new_tokens": self.max_new_tokens,
                "temperature": self.sampling_temperature if self.do_sample else 0.0,
            }
        return config


@dataclass(kw_only=True)
class ClassicPolicyTrainer(ClassicTrainer):
    """Arguments of the trainers on sampled completions."""

    needs_rewards: ClassVar[bool] = True

    if TYPE_CHECKING:  # each trainer has it at a place of its own
        train_dataset: SampleDataset

    ppo_steps: Positive = 1
    """Passes over the samples of a step."""

    clip_eps: PositiveNumber = 0.2
    """Bound of the distance from 1 of the ratio to the policy that generated a sample."""

    log_completions: bool = False
    """Log completions beside the metrics; ``samples.jsonl`` has all of them."""

    max_log_chars: Positive = 320
    """Characters of each that are logged."""

    _offset = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.do_sample:
            raise ValueError("do_sample=False draws the same completion each time: there is nothing to learn from that")

    def test(
        self,
        dataset: SampleDataset | None = None,
        num_batches: int | None = None,
        step: int | None = None,
        eval_temperature: float | None = None,
    ) -> dict[str, Any]:
        """Evaluate the trained model, or before ``train`` the one that it begins with; on the main process.

        Args:
            dataset: ``eval_dataset`` by default.
            num_batches: batches of ``batch_size`` samples; None: all.
            step: evaluate the saved model of this step.
            eval_temperature: ``sampling_temperature`` by default.

        Returns:
            The metrics of ``Evaluator.evaluate``, with its files in ``output_dir/evaluation``. Empty elsewhere.
        """
        if self._read_launch().rank:
            return {}
        samples = self._test_dataset(dataset)
        temperature = self.sampling_temperature if eval_temperature is None else eval_temperature
        return self._evaluate(
            self.model_after(step), samples, sampling_temperature=temperature, num_batches=num_batches
        )

    def _report(self, report: StepReport) -> None:
        super()._report(report)
        if self.log_completions and report.step % self.logging_steps == 0:
            for row in self._read_samples(report.step):
                _LOG.info("reward %s  %r", row.get("reward"), row["completion"][: self.max_log_chars])

    def _read_samples(self, step: int) -> list[dict[str, Any]]:
        """The samples of a step; each call reads only what was appended since the last one."""
        prefix = f'{{"step": {step},'.encode()
        with open(self._run_folder / "samples.jsonl", "rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset = 0  # the run went back to a commit, which shortens the file
            file.seek(self._offset)
            rows = [json.loads(line) for line in file if line.startswith(prefix)]
            self._offset = file.tell()
        return rows

    def _config(self, launch: LaunchEnv) -> dict[str, Any]:
        sampling = sampling_params(self.max_new_tokens, self.sampling_temperature, self.generation_args)
        return {
            **self._data_config(launch),
            "prompts_per_step": self.batch_size * launch.world_size,
            "reward": self._reward(),
            "rollout.max_new_tokens": sampling.max_new_tokens,
            "rollout.temperature": sampling.temperature,
            "rollout.top_k": sampling.top_k,
            "rollout.top_p": sampling.top_p,
            "rollout.stop": list(sampling.stop),
        }

    def _data_config(self, launch: LaunchEnv) -> dict[str, Any]:
        remove_environments(self._data_folder)
        write = partial(write_samples, self._data_folder, rewards=True, empty_reward=self._empty_reward())
        samples = load_samples(self.train_dataset, "train_dataset", rewards=self.needs_rewards)
        train = str(write("train", samples))
        if self.eval_dataset is None:
            # The recipe evaluates before and after the training: here on a few training samples.
            return {"data.train": train, "data.eval": train, "data.eval_rows": launch.world_size}
        held_out = load_samples(self.eval_dataset, "eval_dataset", rewards=self.needs_rewards)
        return {"data.train": train, "data.eval": str(write("eval", held_out)), "data.eval_rows": len(held_out)}

    def _roles(self) -> Mapping[str, type[BaseWorkload]]:
        return _SAMPLED_ROLES

    def _empty_reward(self) -> float | None:
        return None


@names_arguments
@dataclass
class ClassicGRPOTrainer(ClassicPolicyTrainer):
    """Samples groups of completions, and reinforces the better ones of each group: the recipe ``grpo``.

    Example::

        GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=MathDataset(200), num_steps=100).train()

    The advantage of a sample is its reward less the mean of its group's, in standard deviations of its group's. A
    sample whose ``get_reward`` fails or takes too long is counted and not trained on.
    """

    recipe = GRPOTrainer

    train_dataset: SampleDataset
    """Samples with ``prompt`` and ``get_reward``."""

    _: KW_ONLY

    group_size: Annotated[int, Ge(2)] = 4
    """Completions of each prompt."""

    ppo_steps: Positive = 2
    kl_penalty: NonNegativeNumber = 0.0
    """Weight of the KL penalty (k3, in the loss) towards the model that the run begins with."""

    max_error: NonNegativeNumber | None = None
    """With it, the reward of a completion without any text is ``-(max_error + invalid_penalty)``, without
    ``get_reward``."""

    invalid_penalty: NonNegativeNumber = 1.0

    wandb_project: str = "grpo"

    def _roles(self) -> Mapping[str, type[BaseWorkload]]:
        return {**_SAMPLED_ROLES, "reference": ReferenceWorkload} if self.kl_penalty > 0 else _SAMPLED_ROLES

    def _config(self, launch: LaunchEnv) -> dict[str, Any]:
        return {**super()._config(launch), "algorithm.name": "grpo"}

    def _empty_reward(self) -> float | None:
        return None if self.max_error is None else -(self.max_error + self.invalid_penalty)


@names_arguments
@dataclass
class OnPolicyDistillationTrainer(ClassicPolicyTrainer):
    """Lowers the reverse KL to a teacher on the student's own samples: the recipe ``distill``.

    Example::

        OnPolicyDistillationTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct", teacher_model="Qwen/Qwen2.5-1.5B-Instruct", train_dataset=samples
        ).train()

    Samples may have no ``get_reward``: rewards are logged, and nothing is learned from them.
    """

    recipe = DistillationTrainer
    needs_rewards = False

    teacher_model: str | Path
    """Folder or hub name of the teacher, whose vocabulary must be the student's."""

    train_dataset: SampleDataset
    """Samples with ``prompt``."""

    _: KW_ONLY

    wandb_project: str = "onpolicy_distill"

    def _roles(self) -> Mapping[str, type[BaseWorkload]]:
        return {**_SAMPLED_ROLES, "teacher": TeacherWorkload}

    def _config(self, launch: LaunchEnv) -> dict[str, Any]:
        return {
            **super()._config(launch),
            "algorithm.name": "distillation",
            "algorithm.averaging": "sequence",
            "teachers": {"teacher": {"model": str(self.teacher_model)}},
        }
