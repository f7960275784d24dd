# SPDX-License-Identifier: Apache-2.0
"""The sides of ``benchmarks.training``: this project's engines and TRL's trainers, on the same work."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig, RolloutSettings, SamplingParams, TrainSettings
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine

LR = 1e-5
BEST = {"gradient_checkpointing": False}
Precision = Literal["fp32", "bf16"]
QUIET = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}


@dataclass(frozen=True)
class Work:
    """Rows and prompts that all sides get.

    Attributes:
        rows: token ids of each example; all but the first are trained on.
        rows_per_step: of an optimizer step.
        prompts: texts of 32 letters.
        completions: of each prompt.
        new_tokens: of each completion.
        steps: GRPO steps.
    """

    rows: list[list[int]]
    rows_per_step: int
    prompts: list[str]
    completions: int
    new_tokens: int
    steps: int

    @classmethod
    def make(cls, rows: int, steps: int, prompts: int = 8) -> "Work":
        """Examples of 16 to 512 tokens; prompts of 32 letters."""
        generator = random.Random(0)
        lengths = [generator.randint(16, 512) for _ in range(rows)]
        examples = [[generator.randrange(256) for _ in range(length)] for length in lengths]
        texts = ["".join(generator.choices("abcdefgh", k=32)) for _ in range(prompts)]
        return cls(examples, 16, texts, 8, 64, steps)

    @property
    def tokens(self) -> int:
        """Tokens of the examples."""
        return sum(map(len, self.rows))


class Side(Protocol):
    """One setting of one system; :meth:`run` does the work once and returns the seconds it took."""

    name: str

    def run(self, work: Work) -> float:
        """Do it."""
        ...


def reward(completion: str) -> float:
    """Something that costs nothing: the share of one letter."""
    return completion.count("a") / max(1, len(completion))


class OwnSft:
    """One epoch of examples, packed."""

    name = "this project: packed"

    def __init__(self, model: Path, precision: Precision) -> None:
        self._engine = Fsdp2TrainEngine(model, OptimizerConfig(lr=LR), TrainSettings(precision=precision))

    def run(self, work: Work) -> float:
        """See :class:`Side`."""
        started = time.perf_counter()
        for at in range(0, len(work.rows), work.rows_per_step):
            self._engine.step(self._batch(work.rows[at : at + work.rows_per_step]), SFT().loss)
        return time.perf_counter() - started

    def _batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        masks = [np.arange(len(row)) > 0 for row in rows]
        counts = np.array([len(row) - 1 for row in rows], dtype=np.int64)
        weights = SFT().annotate(Batch({"action_tokens": counts}))["weight"]
        return Batch({"tokens": Ragged.from_rows(rows), "action_mask": Ragged.from_rows(masks), "weight": weights})


class MatrixProducts:
    """The products of an epoch's linear layers, forward and backward: what no setting avoids. Without attention."""

    name = "matrix products alone"

    def __init__(self, model: Path, precision: Precision) -> None:
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        modules = AutoModelForCausalLM.from_pretrained(model, dtype=self._dtype).modules()
        self._weights = [module.weight.detach() for module in modules if isinstance(module, torch.nn.Linear)]

    def run(self, work: Work) -> float:
        """See :class:`Side`."""
        steps = range(0, len(work.rows), work.rows_per_step)
        counts = [sum(map(len, work.rows[at : at + work.rows_per_step])) for at in steps]
        widest = max(max(weight.shape) for weight in self._weights)
        numbers = torch.randn(2, max(counts), widest, dtype=self._dtype)
        started = time.perf_counter()
        for count, weight in product(counts, self._weights):
            out, into = weight.shape
            inputs, gradients = numbers[0, :count, :into], numbers[1, :count, :out]
            torch.mm(inputs, weight.t())
            torch.mm(gradients, weight)
            torch.mm(gradients.t(), inputs)
        return time.perf_counter() - started


class OwnGrpo:
    """GRPO steps: weights to the rollout engine, completions, rewards, advantages, an optimizer step."""

    name = "this project: fsdp2 and torch engines"

    def __init__(self, model: Path, precision: Precision) -> None:
        self._train = Fsdp2TrainEngine(model, OptimizerConfig(lr=LR), TrainSettings(precision=precision))
        self._rollout = engine_class(ROLLOUT_ENGINES, "torch")(model, RolloutSettings(precision=precision))

    def run(self, work: Work) -> float:
        """See :class:`Side`."""
        started = time.perf_counter()
        for _ in range(work.steps):
            self._step(work)
        return time.perf_counter() - started

    def _step(self, work: Work) -> None:
        tokenizer, algorithm = self._rollout.tokenizer, GRPO()
        self._rollout.receive(self._train.publish())
        tokens = Ragged.from_rows([tokenizer.encode(prompt) for prompt in work.prompts], dtype=np.int64)
        sampling = SamplingParams(work.new_tokens, 1.0, work.completions, ignore_eos=True)
        prompt_batch = Batch({"prompt_id": np.arange(len(work.prompts)), "tokens": tokens})
        samples = self._rollout.generate(prompt_batch, sampling, (self._train.version,))
        actions = np.array([int(mask.sum()) for mask in samples.ragged("action_mask")], dtype=np.int64)
        rewards = np.array([reward(text) for text in samples.objects("completion")])
        scored = Batch({"prompt_id": samples["prompt_id"], "reward": rewards, "action_tokens": actions})
        rows = algorithm.annotate(scored)
        batch = samples.select("tokens", "action_mask").with_columns(
            old_logprobs=samples["logprobs"], advantage=rows["advantage"], weight=rows["weight"]
        )
        self._train.step(batch, algorithm.loss)


class _Clock(TrainerCallback):
    """The time from the first step's begin to the last one's end."""

    begun = ended = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun = self.begun or time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended = time.perf_counter()


class TrlSft:
    """``SFTTrainer`` over the same examples once."""

    def __init__(self, model: Path, label: str, folder: Path, **options: Any) -> None:
        self.name = f"TRL SFTTrainer: {label}"
        self._model, self._folder, self._options = model, folder, options

    def run(self, work: Work) -> float:
        """See :class:`Side`."""
        clock = _Clock()
        config = SFTConfig(
            str(self._folder),
            num_train_epochs=1,
            learning_rate=LR,
            max_length=512,
            use_cpu=True,
            dataset_kwargs={"skip_prepare_dataset": True} if not self._options.get("packing") else None,
            **{"per_device_train_batch_size": work.rows_per_step} | QUIET | self._options,
        )
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32),
            config,
            train_dataset=Dataset.from_dict({"input_ids": work.rows}),
            processing_class=AutoTokenizer.from_pretrained(self._model),
            callbacks=[clock],
        )
        trainer.train()
        return clock.ended - clock.begun


class TrlGrpo:
    """``GRPOTrainer``: completions of the same number and length."""

    def __init__(self, model: Path, label: str, folder: Path, **options: Any) -> None:
        self.name = f"TRL GRPOTrainer: {label}"
        self._model, self._folder, self._options = model, folder, options

    def run(self, work: Work) -> float:
        """See :class:`Side`."""
        clock = _Clock()
        config = GRPOConfig(
            str(self._folder),
            per_device_train_batch_size=len(work.prompts) * work.completions,
            num_generations=work.completions,
            max_completion_length=work.new_tokens,
            generation_kwargs={"min_new_tokens": work.new_tokens},
            max_steps=work.steps,
            learning_rate=LR,
            use_cpu=True,
            **QUIET | self._options,
        )
        trainer = GRPOTrainer(
            str(self._model),
            lambda completions, **columns: [reward(text) for text in completions],
            config,
            train_dataset=Dataset.from_dict({"prompt": work.prompts * work.steps}),
            processing_class=AutoTokenizer.from_pretrained(self._model),
            callbacks=[clock],
        )
        trainer.train()
        return clock.ended - clock.begun
