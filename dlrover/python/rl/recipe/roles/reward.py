# SPDX-License-Identifier: Apache-2.0
"""REWARD: scores completions by a function, or by a trained model."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dlrover.python.rl.common.by_value import label_of
from dlrover.python.rl.common.errors import ConfigError, DataError, EngineError, VerifierError
from dlrover.python.rl.common.log import cut_middle, get_logger
from dlrover.python.rl.config.typed import salvage
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import arguments_of_template, encode_raw
from dlrover.python.rl.data.pairs import encode_pair
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_info, find_train_errors
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.model.loading import find_model_folder, load_auto
from dlrover.python.rl.environment.core.scoring import Completed, Reward
from dlrover.python.rl.environment.sandbox.confinement import sandbox_level
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier, VerifierPool
from dlrover.python.rl.environment.verifiers import exact
from dlrover.python.rl.recipe.base.config import EngineConfig, RewardConfig
from dlrover.python.rl.recipe.base.engine_workload import EngineWorkload, on_device
from dlrover.python.rl.recipe.base.model_files import validate_model
from dlrover.python.rl.recipe.reporting.rewards import SUMMARIES
from dlrover.python.rl.recipe.rollout.episodes import summarize_rows
from dlrover.python.rl.trainer.workload import BaseWorkload

_LOG = get_logger(__name__)


class RewardWorkload(BaseWorkload):
    """REWARD: calls a reward function, in processes that can be killed."""

    recipe_class: ClassVar[str | None] = "RewardWorkload"

    uses_device: ClassVar[bool] = False  # not even in a process that has one

    @classmethod
    def warm_up(cls) -> None:
        """Start and end a verifier's process, to cache its interpreter and libraries in memory."""
        DeadlineVerifier(exact, timeout_s=5.0).close()

    @classmethod
    def check_config(cls, config: Any) -> Iterable[ConfigError]:
        reward, _ = salvage(RewardConfig, config.get("reward") or {}, "config.reward")
        if reward is None or reward.model is None:
            return []
        message = f"{cls.__name__} calls reward.function: with reward.model it has to be ModelRewardWorkload"
        return [ConfigError("workload.reward.class", message)]

    _is_deterministic = False

    def init_verifier(self, reward: RewardConfig, columns: Collection[str] = ()) -> str:
        """Start the verifiers; returns the level of confinement of programs that the model writes."""
        memory_mb = reward.memory_mb
        start = partial(DeadlineVerifier, reward.function, reward.timeout_s, memory_mb=memory_mb, columns=columns)
        self._ignores_thoughts = reward.thoughts == "ignored"
        self._parts = name_parts(reward.function)
        names = [reward.function] if isinstance(reward.function, str) else reward.function
        self._is_deterministic = not any(":" in name and not name.startswith("dlrover.") for name in names)
        self._verifiers = VerifierPool(reward.workers, start)
        self._shown: set[str] = set()
        return sandbox_level()

    def is_deterministic(self) -> bool:
        return self._is_deterministic

    def score(self, rollouts: Batch) -> Batch:
        """Return summaries of the rows with ``reward`` (float64, NaN if the verifier failed), ``error`` (the reason, or
        None), and for several functions their unweighted values, ``reward/<name>``."""
        completions, answers, infos, prompts, prefixes = (rollouts.objects(name) for name in Completed._fields)
        prefixes = prefixes if self._ignores_thoughts else [None] * len(prefixes)
        samples = map(Completed, completions, answers, (info or {} for info in infos), prompts, prefixes)
        results = self._verifiers.score(samples)
        failures = [result for result in results if isinstance(result, VerifierError)]
        if failures:  # one line for all, with a traceback of the user's function the first time
            reason, details = _first_line(failures[0]), failures[0].remote_traceback
            kind = reason.partition(": ")[0]
            is_new = details and kind not in self._shown
            traceback = f"\n{cut_middle(details, _MOST_TRACEBACK, _CUT)}" if is_new else ""
            self._shown.add(kind)
            _LOG.warning("%d of %d samples failed: %s%s", len(failures), len(results), reason, traceback)
        errors = [_first_line(result) if isinstance(result, VerifierError) else None for result in results]
        failed = Reward(math.nan, dict.fromkeys(self._parts, math.nan))
        rewards = [failed if isinstance(result, VerifierError) else result for result in results]
        values = {"reward": [reward.total for reward in rewards]}
        values |= {label: [reward.parts[name] for reward in rewards] for name, label in self._parts.items()}
        columns = {name: np.array(numbers, dtype=np.float64) for name, numbers in values.items()}
        return summarize_rows(rollouts).with_columns(error=errors, **columns)

    def close(self) -> None:
        if hasattr(self, "_verifiers"):
            self._verifiers.close()


_MOST_TEXT, _MOST_TRACEBACK, _CUT = 300, 3000, "\n[...]\n"


def _first_line(error: VerifierError) -> str:
    return cut_middle(str(error).splitlines()[0], _MOST_TEXT)


def name_parts(function: str | Mapping[str, float]) -> dict[str, str]:
    """Map several functions to columns: ``reward/<label>``, or ``reward/<name>`` if the label is taken."""
    labels = {} if isinstance(function, str) else {name: label_of(name) for name in function}
    unclear = {*SUMMARIES, *(label for label, count in Counter(labels.values()).items() if count > 1)}
    return {name: f"reward/{name if label in unclear else label}" for name, label in labels.items()}


_SEQUENCES, _TOKENS = "ForSequenceClassification", "ForTokenClassification"


class ModelRewardWorkload(EngineWorkload):
    """REWARD: a copy of the frozen model ``reward.model``, with a head of one score.

    Prompt and completion are encoded as in its training, by its own tokenizer and chat template; the reward is the
    score of the last token."""

    recipe_class: ClassVar[str | None] = "RewardWorkload"

    @classmethod
    def check_config(cls, config: Any) -> Iterable[ConfigError]:
        reward, _ = salvage(RewardConfig, config.get("reward") or {}, "config.reward")
        engine, _ = salvage(EngineConfig, config.get("engine") or {}, "config.engine")
        if reward is None or engine is None:
            return []  # the trainer reports their errors
        if reward.model is None:
            return [ConfigError("config.reward.model", f"is required by {cls.__name__}; RewardWorkload needs none")]
        errors = validate_model(reward.model, "config.reward.model")
        folder = Path(reward.model).expanduser()
        if not errors and folder.is_dir() and (fault := _inspect_head(folder)[2]):
            errors.append(ConfigError("config.reward.model", fault))
        if reward.function != RewardConfig.function:
            errors.append(ConfigError("config.reward.function", "is not called if there is a reward.model"))
        info = engine_info(TRAIN_ENGINES, engine.train)
        faults = find_train_errors(engine.train, info, ParallelSizes(), lora=None, bare_head=True)
        return [*errors, *(ConfigError("config.engine.train", fault) for fault in faults)]

    def init_verifier(self, reward: RewardConfig, engine: EngineConfig) -> None:
        """Load the reward model; raise EngineError if it gives no score."""
        if reward.model is None:
            raise EngineError(f"{type(self).__name__} needs reward.model")
        folder = find_model_folder(reward.model)
        self._longest, has_bias, fault = _inspect_head(folder)
        if fault:
            raise EngineError(fault)
        self._make_train_engine(reward.model, engine, head="token", head_bias=has_bias)

    @on_device
    def score(self, rollouts: Batch) -> Batch:
        """Score the rows. A sample fails if it is too long for the model, cannot be encoded, or has no finite score."""
        texts = zip(*(rollouts.objects(name) for name in ("prompt", "completion", "extra_info")), strict=True)
        encoded = [self._encode(*row) for row in texts]
        errors = [tokens if isinstance(tokens, str) else None for tokens in encoded]
        sequences = {row: tokens for row, tokens in enumerate(encoded) if not isinstance(tokens, str)}
        rewards = np.full(len(encoded), np.nan)
        if sequences:
            tokens = Ragged.from_rows(list(sequences.values()), dtype=np.int64)
            ends, last = tokens.offsets[1:] - 1, np.zeros(len(tokens.values), dtype=np.bool_)
            last[ends] = True
            outputs: Batch = self._engine.evaluate(Batch({"tokens": tokens, "action_mask": tokens.like(last)}))
            rewards[list(sequences)] = outputs.ragged("scores").values[ends].astype(np.float64)
        for row in np.flatnonzero(~np.isfinite(rewards)).tolist():
            errors[row] = errors[row] or f"the reward model's score is {rewards[row]}"
            rewards[row] = np.nan
            _LOG.warning("a sample failed: %s", errors[row])
        return summarize_rows(rollouts).with_columns(reward=rewards, error=errors)

    def _encode(
        self, prompt: str | list[Mapping[str, str]], completion: str, extra_info: Mapping[str, Any] | None
    ) -> list[int] | str:
        """Return token ids as in a reward model's training, or the reason why there are none."""
        tokenizer = self._engine.tokenizer
        try:
            if isinstance(prompt, str):
                tokens = encode_raw(tokenizer, prompt, completion).tokens
            else:
                pair = {"messages": prompt, "chosen": completion, "rejected": completion}
                tokens = encode_pair(tokenizer, pair, arguments_of_template(extra_info or {}))[0].tokens
        except DataError as error:
            return f"the reward model cannot read it: {error}"
        if self._longest is not None and len(tokens) > self._longest:
            return f"the reward model reads {self._longest} tokens at most, not {len(tokens)}"
        return tokens


def _inspect_head(folder: Path) -> tuple[int | None, bool, str]:
    """Return the longest input of a reward model, True if its head has a bias, and the fault of the head, if any."""
    config = load_auto("AutoConfig", folder)
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    architecture, fault = (config.architectures or ["a model without a class"])[0], ""
    if not architecture.endswith((_SEQUENCES, _TOKENS)):
        fault = f"{folder} holds {architecture}, which gives no score; recipe.rm trains a reward model"
    elif config.num_labels != 1:
        fault = f"{folder} gives {config.num_labels} scores, not one"
    return longest, architecture.endswith(_TOKENS), fault
