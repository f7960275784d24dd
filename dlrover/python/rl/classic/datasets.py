"""Ready data sets of samples with answers and rewards, and of conversations to learn by heart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.python.rl.classic.envs import EnvBase, get_boxed_answer
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.jsonl import raise_problems
from dlrover.python.rl.data.source import Rows, scan_rows
from dlrover.python.rl.environment.answers import same_answer
from dlrover.python.rl.environment.arithmetic import MathDataset

__all__ = ["AIME2025", "BoxedAnswer", "CapyBaraSFTDataset", "IntellectMathDataset", "MathDataset"]

_ASKS_FOR_A_BOX = "Put the final answer in \\boxed{}."


@dataclass
class BoxedAnswer(EnvBase):
    r"""A problem whose answer is looked for in the last ``\boxed{}``: 1.0 for the same text or number, else 0.0."""

    def get_reward(self, text: str) -> float:
        """Whether the box holds the answer.

        Raises:
            ValueError: the problem has none.
        """
        if self.answer is None:
            raise ValueError("the problem has no answer to compare with")
        boxed = get_boxed_answer(text)
        return float(boxed is not None and same_answer(boxed, str(self.answer)))


class _Loaded(Sequence[EnvBase]):
    """Samples made from the rows of a file, a folder or the hub.

    Args:
        path: where, see :func:`~dlrover.python.rl.data.source.scan_rows`; ``split@`` before it picks a split.
        num_samples: the first so many; None: all.

    Raises:
        DataError: there is no such source, or rows are not what they should be.
        ValueError: ``num_samples`` is not positive.
    """

    def __init__(self, path: str | Path, num_samples: int | None = None) -> None:
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be above 0, not {num_samples}")
        rows, problems = scan_rows(path)
        if problems:
            raise_problems(problems)
        self._samples = [self._sample(row, rows.place(at)) for at, row in enumerate(_first(rows, num_samples))]

    def _sample(self, row: Mapping[str, Any], place: str) -> EnvBase:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index]


class IntellectMathDataset(_Loaded):
    """Problems of mathematics in the columns ``question`` (or ``prompt``, ``problem``) and ``answer``.

    Args:
        path: where.
        num_samples: the first so many; None: all.
    """

    def __init__(self, path: str | Path = "PrimeIntellect/INTELLECT-3-RL:math", num_samples: int | None = None) -> None:
        super().__init__(path, num_samples)

    def _sample(self, row: Mapping[str, Any], place: str) -> EnvBase:
        return _boxed(row, place, ("question", "prompt", "problem"))


class AIME2025(_Loaded):
    """The problems of the American Invitational Mathematics Examination 2025: ``problem`` (or ``question``) and
    ``answer``.

    Args:
        path: where.
        num_samples: the first so many; None: all.
    """

    def __init__(self, path: str | Path = "MathArena/aime_2025", num_samples: int | None = None) -> None:
        super().__init__(path, num_samples)

    def _sample(self, row: Mapping[str, Any], place: str) -> EnvBase:
        return _boxed(row, place, ("problem", "question"))


class CapyBaraSFTDataset(_Loaded):
    """Conversations in several turns, to learn by heart: ``messages``, or ``conversation`` of ``input`` and ``output``.

    Args:
        path: where.
        num_samples: the first so many; None: all.
    """

    def __init__(self, path: str | Path = "trl-lib/Capybara", num_samples: int | None = None) -> None:
        super().__init__(path, num_samples)

    def _sample(self, row: Mapping[str, Any], place: str) -> EnvBase:
        if "messages" in row:
            return EnvBase(row["messages"])
        if "conversation" not in row:
            raise DataError(f"{place}: needs 'messages' or 'conversation'; it has {', '.join(row) or 'nothing'}")
        pairs = [(turn["input"], turn["output"]) for turn in row["conversation"]]
        said = [({"role": "user", "content": asked}, {"role": "assistant", "content": told}) for asked, told in pairs]
        return EnvBase([message for turn in said for message in turn])


def _first(rows: Rows, count: int | None) -> Rows:
    return rows if count is None else rows[:count]


def _boxed(row: Mapping[str, Any], place: str, names: Sequence[str]) -> BoxedAnswer:
    asked = next((row[name] for name in names if isinstance(row.get(name), str)), None)
    if asked is None or row.get("answer") is None:
        raise DataError(f"{place}: needs one of {', '.join(names)} as text, and 'answer'; it has {', '.join(row)}")
    question = asked if "\\boxed" in asked else f"{asked}\n\n{_ASKS_FOR_A_BOX}"
    return BoxedAnswer([{"role": "user", "content": question}], row["answer"])
