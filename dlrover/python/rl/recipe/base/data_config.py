# SPDX-License-Identifier: Apache-2.0
"""The parts of a recipe's configuration about its prompts, and the order of its rows."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.data.sampler import PromptCursor


@dataclass(frozen=True)
class PromptData:
    """Prompts for training and evaluation: rows of ``prompt`` or ``messages``, with ``answer``."""

    train: str | None = None
    """A file (``.json``, ``.jsonl``, ``.csv``, ``.parquet``, ``.arrow``), a folder or a hub name; the prefix ``split@``
    selects a split. None: the environment creates prompts from ``extra_info["seed"]``, one of 16,384 numbers."""

    eval: str | Mapping[str, str] | None = None
    """Prompts for evaluation, given in the same way; or several sets of them by name, each with its own metrics. None:
    ``eval_rows`` prompts are held out of ``train``."""

    eval_rows: Annotated[int, Gt(0)] | None = None
    """Number of evaluation prompts of each set. None: at most 200, the first of ``eval`` or a tenth of ``train``; if
    ``train`` repeats a single prompt, that one; 64 without data."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """Column names of the data: ``{prompt: question}``."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's chat template for prompts of messages, such as ``{enable_thinking: false}`` or
    ``tools``. They take the place of those that an environment declares, and a row's own take theirs."""

    max_prompt_tokens: Annotated[int, Gt(0)] | None = None
    """Maximum tokens of a prompt, chat template included. None: the limit of the model."""

    over_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of prompts longer than ``max_prompt_tokens``, evaluation prompts included, when the model is loaded:
    refuse the data and name them; or drop and count them. Prompts are never cut."""

    @property
    def sources(self) -> dict[str, str]:
        """All of them by their keys."""
        sets = {f"eval.{name}" if name else "eval": source for name, source in self.eval_sets.items()}
        return ({"train": self.train} if self.train else {}) | sets

    @property
    def eval_sets(self) -> dict[str, str]:
        """The sets of ``eval`` by name, which is empty for a single one; none if it is None."""
        if self.eval is None:
            return {}
        return {"": self.eval} if isinstance(self.eval, str) else dict(self.eval)


@dataclass(frozen=True)
class EvalConfig:
    """Generation of answers to evaluation prompts."""

    samples: Annotated[int, Gt(0)] = 1
    """Answers to each prompt. Above 1 there are the metrics ``avg@<samples>``, the mean reward, and, where rewards are
    0 or 1, ``pass@<k>``: the probability that one of k answers is right, estimated without bias for the powers of 2 up
    to ``samples``, and for ``samples`` (equation 1 of arXiv:2107.03374)."""

    temperature: Annotated[float, Ge(0.0)] = 0.0
    """Sampling temperature; 0: greedy. Above 0, ``rollout.top_k`` and ``rollout.top_p`` apply."""


def name_source(key: str, source: str, errors: Iterable[ConfigError]) -> list[ConfigError]:
    """Errors of a data source; those of all of it with the key that names it, those of rows as they are."""
    return [
        ConfigError(f"config.data.{key}", f"{source}: {error.what}") if error.where == source else error
        for error in errors
    ]


def digest_of_rows(rows: Iterable[Any]) -> str:
    """Of JSON values, in their order. Of other objects in them the type alone counts: their text may be an address."""
    whole = blake2b(digest_size=16)
    for row in rows:
        whole.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode() + b"\n")
    return whole.hexdigest()


class JobCursor(PromptCursor):
    """The order of the rows of a job, of which ``digest`` is :func:`digest_of_rows`. Its state has their ``source``,
    and its errors name the keys of the job."""

    def __init__(  # noqa: PLR0913 -- what a position is of
        self, source: str, rows: int, batch_size: int, seed: int, total: int | None = None, digest: str = ""
    ) -> None:
        super().__init__(rows, batch_size, seed, total)
        self._source, self._digest = source, digest

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "source": self._source, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume; raise DataError if the rows, their number or the seed have changed."""
        try:
            super().load_state_dict(state)
        except DataError as error:
            raise DataError([self._in_terms_of_job(fault, state) for fault in error.errors]) from None
        if (was := state.get("digest")) and self._digest and was != self._digest:
            what = f"'{self._source}' has other rows, or in another order, than the run was begun with"
            raise DataError([ConfigError("config.data.train", f"{what}: go on with those, or begin another run")])

    def _in_terms_of_job(self, fault: ConfigError, state: Mapping[str, Any]) -> ConfigError:
        own, was = super().state_dict(), state.get(fault.where)
        advice = "go on with that, or begin another run"
        if fault.where == "seed":
            return ConfigError("config.seed", f"{own['seed']}, but the run was begun with {was}: {advice}")
        if fault.where == "rows":
            source = state.get("source", self._source)  # states of earlier versions have none
            what = f"'{self._source}' has {own['rows']} rows to train on, but the run was begun with"
            if source == self._source:
                what = f"{what} {was} of them: the file has changed, or the part that is held out"
                return ConfigError("config.data", f"{what}; {advice}")
            return ConfigError("config.data.train", f"{what} '{source}', which had {was}: {advice}")
        return fault
