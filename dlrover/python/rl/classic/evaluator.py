# SPDX-License-Identifier: Apache-2.0
"""The evaluation of a model on a data set's samples, and the checks of RLFusion's arguments."""

import copy
import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from annotated_types import Ge, Gt
from rich.console import Console
from rich.progress import track

from dlrover.python.rl.classic.envs import LoadedSample, SampleDataset, load_samples, write_rewards
from dlrover.python.rl.common import disk_space
from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.config.typed import check_fields
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import encode_prompt
from dlrover.python.rl.engine.api.base import BaseRolloutEngine, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class
from dlrover.python.rl.engine.model.loading import as_causal_lm
from dlrover.python.rl.engine.vllm import VllmOptions
from dlrover.python.rl.environment.core.functions import find_argument_fault
from dlrover.python.rl.environment.core.scoring import Completed, Reward
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier, VerifierPool
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]
PositiveNumber = Annotated[float, Gt(0)]

T = TypeVar("T")

RESULTS, METRICS = "results.jsonl", "metrics.json"

_ENGINES = {"hf": "torch", "vllm": "vllm"}
_VLLM_ENVIRONMENT = {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
_SHARED_SETTINGS = ("tensor_parallel_size", "gpu_memory_utilization")
_BATCHES_PER_CALL = 8  # the engine starts the next completion as soon as one ends
_GENERATION_KEYS = {"top_k": "top_k", "top_p": "top_p", "stop": "stop", "stop_strings": "stop"}
_TRL_ARGUMENTS = {"args", "reward_funcs", "processing_class", "peft_config", "callbacks", "data_collator"}


def names_arguments(kind: type[T]) -> type[T]:
    """Decorate a class so that the error for an unknown argument names the nearest one."""
    original: Callable[..., None] = vars(kind)["__init__"]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if fault := find_argument_fault(original, kwargs, self, *args):
            if foreign := ", ".join(sorted(_TRL_ARGUMENTS & kwargs.keys())):
                fault = f"RLFusion's class has no {foreign}: use a function such as dlrover.rl.train_grpo or train_sft"
            raise TypeError(f"{kind.__name__.removeprefix('Classic')}: {fault}")
        original(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def sampling_params(
    max_new_tokens: int, temperature: float, generation_args: Mapping[str, Any] | None
) -> SamplingParams:
    """Return sampling parameters. Raises ValueError for a key of ``generation_args`` that is not supported."""
    options: dict[str, Any] = {}
    for name, value in (generation_args or {}).items():
        if name not in _GENERATION_KEYS:
            raise ValueError(f"generation_args has no '{name}'{hint(name, _GENERATION_KEYS)}")
        options[_GENERATION_KEYS[name]] = value
    if "stop" in options:
        options["stop"] = (options["stop"],) if isinstance(options["stop"], str) else tuple(options["stop"])
    return SamplingParams(max_new_tokens, temperature, **options)


@names_arguments
@dataclass
class Evaluator:
    """Generates a completion of every prompt of a data set, and scores it.

    Completions depend on the weights, the seed and the sample, not on the batch. A ``get_reward`` that takes too long,
    raises, or returns no number leaves its sample without a reward; it runs in processes that can be killed.

    Raises:
        ValueError: arguments have invalid values; names each.
        MissingExtra: ``engine="vllm"``, and vLLM is not installed.
    """

    model: str | Path
    """Folder or hub name of a causal language model."""

    dataset: SampleDataset
    output_dir: str | Path = "./outputs/evaluation"
    """The folder of ``results.jsonl`` and ``metrics.json``."""

    engine: Literal["hf", "vllm"] = "hf"
    """``hf``: Hugging Face models on the engine in plain PyTorch."""

    vllm_args: Mapping[str, Any] | None = None
    """vLLM's arguments that ``VllmOptions.engine_args`` allows."""

    generation_args: Mapping[str, Any] | None = None
    """``top_k``, ``top_p``, ``stop``."""

    seed: NonNegative = 42
    max_new_tokens: Positive = 1024
    batch_size: Positive = 1
    """The completions that are generated at a time."""

    do_sample: bool = True
    """False: greedy decoding."""

    sampling_temperature: PositiveNumber = 1.0
    num_batches: Positive | None = None
    show_progress: bool = True
    reward_timeout_s: PositiveNumber = 30.0
    _loaded: BaseRolloutEngine | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.vllm_args and self.engine != "vllm":
            raise ValueError("vllm_args need engine='vllm'")
        vllm_settings(RolloutSettings(), self.vllm_args or {})
        self._sampling()

    def set_model(self, model: str | Path) -> None:
        """Evaluate another model from now on."""
        self.close()
        self.model = model

    def close(self) -> None:
        """Release the model; :meth:`evaluate` loads it again."""
        if self._loaded is not None:
            self._loaded.meta()
        self._loaded = None

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model, and write both files.

        Returns:
            The content of ``metrics.json``: ``num_samples``, ``reward_mean``, ``reward_std`` (of the population; both
            None if no completion was scored), ``completion_tokens_mean`` and ``failed``.

        Raises:
            EngineError: the model cannot be loaded, or cannot complete a prompt.
            ValueError: samples are invalid; names each.
        """
        if self._loaded is None:
            precision: Any = "bf16" if _device() == "cuda" else "fp32"
            settings = RolloutSettings(_device(), precision, self.batch_size)
            if self.engine == "vllm":
                for name, value in _VLLM_ENVIRONMENT.items():
                    os.environ.setdefault(name, value)
                settings = vllm_settings(settings, self.vllm_args or {})
            self._loaded = engine_class(ROLLOUT_ENGINES, _ENGINES[self.engine])(self.model, settings)
        return self._evaluate(self._loaded)

    def evaluate_with_model(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Evaluate a copy of a model in memory, and write both files."""
        settings = RolloutSettings(_device(), max_batch=self.batch_size)
        lm = as_causal_lm(copy.deepcopy(model).float(), tokenizer, settings.device)
        engine = engine_class(ROLLOUT_ENGINES, "torch")(lm, settings)
        try:
            return self._evaluate(engine)
        finally:
            engine.meta()

    def _sampling(self) -> SamplingParams:
        temperature = self.sampling_temperature if self.do_sample else 0.0
        return sampling_params(self.max_new_tokens, temperature, self.generation_args)

    def _evaluate(self, engine: BaseRolloutEngine) -> dict[str, Any]:
        samples = load_samples(self.dataset, "dataset")
        if self.num_batches is not None:
            samples = samples[: self.num_batches * self.batch_size]
        tokens = [encode_prompt(engine.tokenizer, sample.prompt) for sample in samples]
        ids = np.arange(len(samples), dtype=np.int64)
        prompts = Batch({"prompt_id": ids, "tokens": Ragged.from_rows(tokens, dtype=np.int64)})
        size = self.batch_size * _BATCHES_PER_CALL
        parts = [prompts.rows(start, min(start + size, len(ids))) for start in range(0, len(ids), size)]
        shown = track(parts, "evaluating", console=Console(stderr=True), disable=not self.show_progress)
        generated = Batch.concat([engine.generate(part, self._sampling(), (self.seed,)) for part in shown])
        completions = generated.objects("completion")
        results = score(samples, completions, self.reward_timeout_s)
        rewards = [result for result in results if isinstance(result, float)]
        metrics = {
            "num_samples": len(samples),
            "reward_mean": math.fsum(rewards) / len(rewards) if rewards else None,
            "reward_std": float(np.std(rewards)) if rewards else None,
            "completion_tokens_mean": int(generated.ragged("action_mask").values.sum()) / len(samples),
            "failed": sum(isinstance(result, VerifierError) for result in results),
        }
        if LaunchEnv.from_env(os.environ).rank:
            return metrics  # the main process writes
        lines = []
        for sample, completion, result in zip(samples, completions, results, strict=True):
            row = {"prompt": sample.prompt, "answer": sample.answer, "generated_answer": completion, "reward": result}
            if isinstance(result, VerifierError):
                row |= {"reward": None, "error": str(result).splitlines()[0]}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        folder = Path(self.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        disk_space.replace(folder / RESULTS, "".join(lines).encode())
        disk_space.replace(folder / METRICS, json.dumps(metrics, indent=2).encode())
        return metrics


def score(
    samples: Sequence[LoadedSample], completions: Sequence[str], timeout_s: float
) -> list[float | VerifierError | None]:
    """Return the reward of each completion, the error of its ``get_reward``, or None for a sample without one."""
    rewards: list[float | VerifierError | None] = [None] * len(samples)
    scored = [number for number, sample in enumerate(samples) if sample.has_reward]
    if not scored:
        return rewards
    calls = [Completed(completions[number], None, {"split": "dataset", "number": number}) for number in scored]
    with tempfile.TemporaryDirectory() as folder:
        function = write_rewards(Path(folder), {"dataset": samples})
        pool = VerifierPool(min(2, len(scored)), partial(DeadlineVerifier, function, timeout_s))
        try:
            results = pool.score(calls)
        finally:
            pool.close()
    for number, result in zip(scored, results, strict=True):
        rewards[number] = result.total if isinstance(result, Reward) else result
    return rewards


def vllm_settings(settings: RolloutSettings, arguments: Mapping[str, Any]) -> RolloutSettings:
    """Add vLLM's arguments to ``settings``; raises ValueError for an argument that the engine itself sets."""
    shared = {name: arguments[name] for name in _SHARED_SETTINGS if name in arguments}
    options = {name: value for name, value in arguments.items() if name not in shared}
    VllmOptions(engine_args=options)
    return replace(settings, backend={"engine_args": options} if options else {}, **shared)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
