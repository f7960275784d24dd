# SPDX-License-Identifier: Apache-2.0
"""Data sets of environments, from a file, a folder or the hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.python.rl.classic.envs import EnvBase
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.jsonl import raise_errors
from dlrover.python.rl.data.source import scan_rows
from dlrover.python.rl.environment.core.rewards import boxed_answer, same_answer
from dlrover.python.rl.environment.verifiers.arithmetic import MathDataset

__all__ = ["AIME2025", "CapyBaraSFTDataset", "IntellectMathDataset", "MathDataset"]


@dataclass
class BoxedAnswer(EnvBase):
    r"""Rewards the last ``\boxed{}`` of a completion: 1.0 for the same text or number, else 0.0."""

    def get_reward(self, text: str) -> float:
        if self.answer is None:
            raise ValueError("the sample has no answer to compare with")
        boxed = boxed_answer(text)
        return float(boxed is not None and same_answer(boxed, str(self.answer)))


class _FileDataset(list[EnvBase]):
    """Samples from the rows of a file, a folder or the hub.

    Args:
        path: see :func:`~dlrover.python.rl.data.source.scan_rows`; ``split@`` before it selects a split.
        num_samples: use only the first samples; None: all.

    Raises DataError if there is no such source or rows are invalid, ValueError if ``num_samples`` is not positive.
    """

    default_path = ""
    columns: Sequence[str] = ()  # names of the prompt's column, the preferred one first

    def __init__(self, path: str | Path = "", num_samples: int | None = None) -> None:
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be above 0, not {num_samples}")
        rows, errors = scan_rows(path or self.default_path)
        raise_errors(errors)
        count = len(rows) if num_samples is None else min(num_samples, len(rows))
        super().__init__(self._make_sample(rows[number], rows.location(number)) for number in range(count))

    def _make_sample(self, row: Mapping[str, Any], place: str) -> EnvBase:
        text = next((row[name] for name in self.columns if isinstance(row.get(name), str)), None)
        if text is None or row.get("answer") is None:
            names = ", ".join(self.columns)
            raise DataError(f"{place}: needs one of {names} as text, and 'answer'; it has {', '.join(row)}")
        question = text if "\\boxed" in text else f"{text}\n\nPut the final answer in \\boxed{{}}."
        return BoxedAnswer([{"role": "user", "content": question}], row["answer"])


class IntellectMathDataset(_FileDataset):
    """Mathematics in the columns ``question`` (or ``prompt``, ``problem``) and ``answer``."""

    default_path = "PrimeIntellect/INTELLECT-3-RL:math"
    columns = ("question", "prompt", "problem")


class AIME2025(_FileDataset):
    """The American Invitational Mathematics Examination 2025: ``problem`` (or ``question``) and ``answer``."""

    default_path = "MathArena/aime_2025"
    columns = ("problem", "question")


class CapyBaraSFTDataset(_FileDataset):
    """Conversations for SFT: ``messages``, or ``conversation`` of ``input`` and ``output``."""

    default_path = "trl-lib/Capybara"

    def _make_sample(self, row: Mapping[str, Any], place: str) -> EnvBase:
        if "messages" in row:
            return EnvBase(row["messages"])
        if "conversation" not in row:
            raise DataError(f"{place}: needs 'messages' or 'conversation'; it has {', '.join(row) or 'nothing'}")
        roles = (("user", "input"), ("assistant", "output"))
        return EnvBase([{"role": role, "content": turn[key]} for turn in row["conversation"] for role, key in roles])
