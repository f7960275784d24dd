"""Completions of a model for the samples of a data set, and what they are worth."""

import copy
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from dlrover.python.rl.algorithm.fields import check_fields
from dlrover.python.rl.classic.arguments import NonNegative, Positive, PositiveNumber, names_arguments, sampling_of
from dlrover.python.rl.classic.envs import Samples, Taken, take
from dlrover.python.rl.classic.rewards import reward_function, write_rows
from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import encode_prompt
from dlrover.python.rl.engine.base import RolloutEngine, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.registry import ROLLOUT, engine_class
from dlrover.python.rl.engine.torch.loading import as_causal_lm
from dlrover.python.rl.environment.deadline import DeadlineVerifier
from dlrover.python.rl.environment.pool import VerifierPool
from dlrover.python.rl.recipe.disk import replace
from dlrover.python.rl.runtime.torchrun.links import Place

RESULTS, METRICS = "results.jsonl", "metrics.json"

_ENGINES = {"hf": "torch", "vllm": "vllm"}
_VLLM_ENVIRONMENT = {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
_OWN_SETTINGS = ("tensor_parallel_size", "gpu_memory_utilization")
_AT_A_TIME = 8
"""Batches that an engine is given together; it fills a place as soon as a completion has ended."""


@names_arguments
@dataclass
class Evaluator:
    """Has a model complete every prompt of a data set, and judges the completions.

    Completions depend on the weights, the seed and the sample, not on what they are drawn together with. ``get_reward``
    runs in processes that can be killed: one that takes too long, raises or returns no number leaves its sample without
    a reward, counted in ``failed``.

    Raises:
        ValueError: an argument has a value that it cannot have; names each.
        MissingExtra: ``engine="vllm"``, and vLLM is not installed.
    """

    model: str | Path
    """Folder or hub name of a causal language model."""

    dataset: Samples
    """Samples with ``prompt``, ``answer`` and ``get_reward``."""

    output_dir: str | Path = "./outputs/evaluation"
    """Where ``results.jsonl`` and ``metrics.json`` go."""

    engine: Literal["hf", "vllm"] = "hf"
    """``hf``: Hugging Face models by the engine in plain PyTorch."""

    vllm_args: Mapping[str, Any] | None = None
    """Arguments of vLLM, in its own words."""

    generation_args: Mapping[str, Any] | None = None
    """``top_k``, ``top_p``, ``stop``."""

    seed: NonNegative = 42
    max_new_tokens: Positive = 1024
    """Tokens of a completion at most."""

    batch_size: Positive = 1
    """Completions that are drawn at a time."""

    do_sample: bool = True
    """False: the most likely token each time."""

    sampling_temperature: PositiveNumber = 1.0
    num_batches: Positive | None = None
    """Evaluate the first so many batches; None: all."""

    show_progress: bool = True
    """A progress bar on standard error."""

    reward_timeout_s: PositiveNumber = 30.0
    """Seconds that ``get_reward`` may take."""

    _loaded: RolloutEngine | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.vllm_args and self.engine != "vllm":
            raise ValueError("vllm_args go with engine='vllm'")
        self._sampling()

    def set_model(self, model: str | Path) -> None:
        """Evaluate another model from now on."""
        self.close()
        self.model = model

    def close(self) -> None:
        """Let go of the model; :meth:`evaluate` loads it again."""
        if self._loaded is not None:
            self._loaded.meta()
        self._loaded = None

    def evaluate(self) -> dict[str, Any]:
        """Evaluate, and write both files.

        Returns:
            What is in ``metrics.json``: ``num_samples``, ``reward_mean``, ``reward_std`` (of the population; both None
            where no completion was judged), ``completion_tokens_mean`` and ``failed``.

        Raises:
            EngineError: the model cannot be loaded, or cannot complete a prompt.
            ValueError: a sample is not what it should be; names each.
        """
        if self._loaded is None:
            self._loaded = self._load()
        return self._evaluate(self._loaded)

    def evaluate_with_model(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """The same of a Hugging Face model in memory, which stays as it is: a copy is evaluated."""
        settings = RolloutSettings(_device(), max_batch=self.batch_size)
        lm = as_causal_lm(copy.deepcopy(model).float(), tokenizer, settings.device)
        engine = engine_class(ROLLOUT, "torch")(lm, settings)
        try:
            return self._evaluate(engine)
        finally:
            engine.meta()

    def _load(self) -> RolloutEngine:
        precision: Any = "bf16" if _device() == "cuda" else "fp32"
        settings = RolloutSettings(_device(), precision, self.batch_size)
        if self.engine == "vllm":
            for name, value in _VLLM_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            settings = vllm_settings(settings, self.vllm_args or {})
        loaded: RolloutEngine = engine_class(ROLLOUT, _ENGINES[self.engine])(self.model, settings)
        return loaded

    def _sampling(self) -> SamplingParams:
        temperature = self.sampling_temperature if self.do_sample else 0.0
        return sampling_of(self.max_new_tokens, temperature, self.generation_args)

    def _evaluate(self, engine: RolloutEngine) -> dict[str, Any]:
        taken = take(self.dataset, "dataset")
        if self.num_batches is not None:
            taken = taken[: self.num_batches * self.batch_size]
        drawn = Batch.concat(list(self._drawn(engine, taken)))
        completions = drawn.objects("completion")
        judged = judge(taken, completions, self.reward_timeout_s)
        tokens = [int(mask.sum()) for mask in drawn.ragged("action_mask")]
        metrics = _metrics(judged, tokens)
        if Place.from_env(os.environ).rank:
            return metrics  # the main process writes
        folder = Path(self.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [_row(*row) for row in zip(taken, completions, judged, strict=True)]
        replace(folder / RESULTS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        replace(folder / METRICS, json.dumps(metrics, indent=2).encode())
        return metrics

    def _drawn(self, engine: RolloutEngine, taken: Sequence[Taken]) -> Iterator[Batch]:
        at_a_time = self.batch_size * _AT_A_TIME
        with _progress(len(taken), self.show_progress) as advance:
            for start in range(0, len(taken), at_a_time):
                part = taken[start : start + at_a_time]
                tokens = [encode_prompt(engine.tokenizer, item.prompt) for item in part]
                ids = np.arange(start, start + len(part), dtype=np.int64)
                asked = Batch({"prompt_id": ids, "tokens": Ragged.from_rows(tokens, dtype=np.int64)})
                yield engine.generate(asked, self._sampling(), (self.seed,))
                advance(len(part))


def judge(taken: Sequence[Taken], completions: Sequence[str], timeout_s: float) -> list[float | VerifierError | None]:
    """The reward of each completion; why it has none, where ``get_reward`` failed; None where there is no such method.

    Args:
        taken: the samples.
        completions: one for each.
        timeout_s: seconds that a call may take.
    """
    able = [at for at, item in enumerate(taken) if item.rewards]
    judged: list[float | VerifierError | None] = [None] * len(taken)
    if not able:
        return judged
    with tempfile.TemporaryDirectory() as folder:
        file = write_rows(Path(folder), "judged", taken)
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        pool = VerifierPool(min(2, len(able)), partial(DeadlineVerifier, reward_function(Path(folder)), timeout_s))
        try:
            said = pool.judge((completions[at], None, rows[at]["extra_info"]) for at in able)
        finally:
            pool.close()
    for at, reward in zip(able, said, strict=True):
        judged[at] = reward
    return judged


def vllm_settings(settings: RolloutSettings, given: Mapping[str, Any]) -> RolloutSettings:
    """Settings with vLLM's own arguments, as ``vllm.LLM`` takes them."""
    own = {name: given[name] for name in _OWN_SETTINGS if name in given}
    further = {name: value for name, value in given.items() if name not in own}
    backend = {"engine_args": further} if further else {}
    return RolloutSettings(settings.device, settings.precision, settings.max_batch, backend=backend, **own)


def _metrics(judged: Sequence[float | VerifierError | None], tokens: Sequence[int]) -> dict[str, Any]:
    rewards = [reward for reward in judged if isinstance(reward, float)]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    return {
        "num_samples": len(judged),
        "reward_mean": mean,
        "reward_std": float(np.std(rewards)) if rewards else None,
        "completion_tokens_mean": sum(tokens) / len(tokens),
        "failed": sum(isinstance(reward, VerifierError) for reward in judged),
    }


def _row(item: Taken, completion: str, reward: float | VerifierError | None) -> dict[str, Any]:
    row = {"prompt": item.prompt, "answer": item.answer, "generated_answer": completion}
    if isinstance(reward, VerifierError):
        return {**row, "reward": None, "error": str(reward).splitlines()[0]}
    return {**row, "reward": reward}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Any]:
    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("evaluating", total=total)
        yield lambda count: bar.advance(task, count)
