# SPDX-License-Identifier: Apache-2.0
"""The parts of a recipe's configuration about its prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt


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

    max_prompt_tokens: Annotated[int, Gt(0)] | None = None
    """Maximum tokens of a prompt, chat template included. None: the limit of the model."""

    over_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of prompts longer than ``max_prompt_tokens``, evaluation prompts included, when the model is loaded:
    refuse the data and name them; or drop and count them. Prompts are never cut."""

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
