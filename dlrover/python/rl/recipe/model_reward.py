"""REWARD by a trained model: scores completions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoConfig

from dlrover.python.rl.common.errors import DataError, EngineError, Problem
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.typed import salvage
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import encode_raw
from dlrover.python.rl.data.pairs import encode_pair
from dlrover.python.rl.engine.abilities import train_faults
from dlrover.python.rl.engine.base import Rendezvous, TrainEngine
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.engine.registry import TRAIN, engine_class
from dlrover.python.rl.engine.torch.blueprint import model_folder
from dlrover.python.rl.recipe.config import EngineConfig, RewardConfig, model_problems
from dlrover.python.rl.recipe.device_turns import EngineWorkload, on_device
from dlrover.python.rl.recipe.members import device_of, train_settings, use_threads, warming
from dlrover.python.rl.recipe.sample_rows import told_of

_LOG = get_logger(__name__)

_SEQUENCES, _TOKENS = "ForSequenceClassification", "ForTokenClassification"


class ModelRewardWorkload(EngineWorkload):
    """REWARD: a frozen model with a head of one score, which ``reward.model`` names; ``recipe.rm`` trains one.

    The reward is its score of the last token of prompt and completion, encoded as pairs are in its training: by its own
    tokenizer and, where the prompt is messages, its own chat template, with the end mark behind the completion. So its
    vocabulary need not be the policy's. Each member holds a whole copy.
    """

    @classmethod
    def check_config(cls, config: Any) -> Iterable[Problem]:
        """Whether there is a model, that gives a score, and nothing else that judges."""
        reward, _ = salvage(RewardConfig, config.get("reward") or {}, "config.reward")
        engine, _ = salvage(EngineConfig, config.get("engine") or {}, "config.engine")
        if reward is None or engine is None:
            return []  # The trainer says what is wrong with them.
        if reward.model is None:
            return [Problem("config.reward.model", f"is required by {cls.__name__}; RewardWorkload calls a function")]
        problems = model_problems(reward.model, "config.reward.model")
        if not problems and (folder := Path(reward.model).expanduser()).is_dir():
            problems += [Problem("config.reward.model", fault) for fault in _head_of(folder)[1]]
        if reward.function != RewardConfig.function:
            problems.append(Problem("config.reward.function", "is not called where reward.model judges"))
        faults = train_faults(engine.train, ParallelSizes(), lora=False, bare_head=True)
        return [*problems, *(Problem("config.engine.train", fault) for fault in faults)]

    @classmethod
    def warm_up(cls) -> None:
        """Import and build what loading a model and evaluating it need."""
        warming().warm_reference()

    def init_verifier(self, reward: RewardConfig, engine: EngineConfig) -> None:
        """Load the reward model.

        Raises:
            EngineError: there is none, or it gives no score.
        """
        if reward.model is None:
            raise EngineError(f"{type(self).__name__} needs reward.model")
        folder = model_folder(reward.model)
        self._longest, faults = _head_of(folder)
        if faults:
            raise EngineError("; ".join(faults))
        use_threads(engine.threads)
        device = device_of(self, engine)
        settings = train_settings(engine, device, ParallelSizes())
        settings = replace(settings, head="token", head_bias=_kind(AutoConfig.from_pretrained(folder)) == _TOKENS)
        with self._first_turn(device) as memory:
            made = engine_class(TRAIN, engine.train)
            self._engine: TrainEngine = made(reward.model, None, settings, Rendezvous(), memory)

    @on_device
    def score(self, rollouts: Batch) -> Batch:
        """Score completions.

        Returns:
            As :meth:`RewardWorkload.score <dlrover.python.rl.recipe.reward.RewardWorkload.score>` gives it. A sample
            has failed if it is too long for the model, or cannot be encoded, or its score is not finite.
        """
        asked = zip(rollouts.objects("prompt"), rollouts.objects("completion"), strict=True)
        encoded = [self._encoded(prompt, completion) for prompt, completion in asked]
        rows = [row for row, told in enumerate(encoded) if not isinstance(told, str)]
        rewards = np.full(len(encoded), np.nan)
        errors = [told if isinstance(told, str) else None for told in encoded]
        if rows:
            rewards[rows] = self._scores([told for told in encoded if not isinstance(told, str)])
        for row in np.flatnonzero(~np.isfinite(rewards)).tolist():
            errors[row] = errors[row] or f"the reward model's score is {rewards[row]}"
            rewards[row] = np.nan
            _LOG.warning("a sample failed: %s", errors[row])
        return told_of(rollouts).with_columns(reward=rewards, error=errors)

    def _encoded(self, prompt: str | list[Mapping[str, str]], completion: str) -> list[int] | str:
        """Tokens, or why there are none."""
        try:
            tokens = encode_answer(self._engine.tokenizer, prompt, completion)
        except DataError as error:
            return f"the reward model cannot read it: {error}"
        if self._longest is not None and len(tokens) > self._longest:
            return f"the reward model reads {self._longest} tokens at most, not {len(tokens)}"
        return tokens

    def _scores(self, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """``[sequences]``: at the last token of each."""
        tokens = Ragged.from_rows(sequences, dtype=np.int64)
        ends = tokens.offsets[1:] - 1
        last = np.zeros(len(tokens.values), dtype=np.bool_)
        last[ends] = True
        told = self._engine.evaluate(Batch({"tokens": tokens, "action_mask": tokens.like(last)}))
        return told.ragged("scores").values[ends].astype(np.float64)


def encode_answer(tokenizer: Any, prompt: str | list[Mapping[str, str]], completion: str) -> list[int]:
    """Token ids of a completion behind its prompt, as a pair of the two would be encoded for a reward model.

    Raises:
        DataError: the tokenizer cannot encode it.
    """
    if isinstance(prompt, str):
        return encode_raw(tokenizer, prompt, completion).tokens
    return encode_pair(tokenizer, {"messages": prompt, "chosen": completion, "rejected": completion})[0].tokens


def _head_of(folder: Path) -> tuple[int | None, list[str]]:
    """How many tokens a model reads at most, and what keeps it from giving a score."""
    config = AutoConfig.from_pretrained(folder)
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not _kind(config):
        named = ", ".join(config.architectures or ["a model without a class"])
        return longest, [f"{folder} holds {named}, which gives no score: recipe.rm trains a model that does"]
    return longest, [f"{folder} gives {config.num_labels} scores, not one"] if config.num_labels != 1 else []


def _kind(config: Any) -> str:
    named = (config.architectures or [""])[0]
    return next((kind for kind in (_SEQUENCES, _TOKENS) if named.endswith(kind)), "")
