# SPDX-License-Identifier: Apache-2.0
"""Samples as environments: a conversation, an answer, and the reward of a completion; and ready data sets of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.jsonl import raise_errors
from dlrover.python.rl.data.source import scan_rows
from dlrover.python.rl.environment.core.rewards import boxed_answer as get_boxed_answer
from dlrover.python.rl.environment.core.rewards import same_answer
from dlrover.python.rl.environment.verifiers.arithmetic import EnvBase

__all__ = ["AIME2025", "CapyBaraSFTDataset", "EnvBase", "IntellectMathDataset", "get_boxed_answer", "load_samples"]

_ROLES = ("system", "user", "assistant")
_MAX_ERRORS = 20


class SampleDataset(Protocol):
    """A data set of PyTorch, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class LoadedSample:
    """A checked sample: its messages, its reference answer, and the object that the data set gave."""

    prompt: list[dict[str, str]]
    answer: int | float | str | None
    environment: Any

    @property
    def has_reward(self) -> bool:
        method = getattr(type(self.environment), "get_reward", None)
        return method is not None and method is not EnvBase.get_reward


def load_samples(dataset: SampleDataset, name: str, rewards: bool = False, answers: bool = False) -> list[LoadedSample]:
    """Fetch every sample of the data set ``name`` once, and check it.

    Args:
        dataset: of :class:`EnvBase` objects, others with ``prompt`` and ``answer``, or dicts of these.
        rewards: each sample must have ``get_reward``.
        answers: each sample must have an answer, or an assistant's message.

    Raises:
        TypeError: it has no length, or no samples by number.
        ValueError: it is empty, or samples are invalid; names each by its number (20 at most).
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"{name} must have a length and give a sample for each number, as a list does")
    samples: list[LoadedSample] = []
    errors: list[str] = []
    for number in range(len(dataset)):
        item = dataset[number]
        faults = _validate_sample(item)
        if not faults:
            messages = [{key: message[key] for key in ("role", "content")} for message in _field(item, "prompt")]
            samples.append(LoadedSample(messages, _field(item, "answer"), item))
            faults = _validate_purpose(samples[-1], rewards, answers)
        errors += [f"{name}[{number}] {fault}" for fault in faults]
    if errors:
        more = [f"and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
        raise ValueError("; ".join([*errors[:_MAX_ERRORS], *more]))
    if not samples:
        raise ValueError(f"{name} is empty")
    return samples


def _validate_purpose(sample: LoadedSample, rewards: bool, answers: bool) -> list[str]:
    errors = []
    if rewards and not sample.has_reward:
        errors.append(f"has no reward: {type(sample.environment).__name__} must define get_reward(text)")
    if answers and sample.answer is None and all(message["role"] != "assistant" for message in sample.prompt):
        errors.append("has nothing to learn: neither an answer nor an assistant's message")
    if answers and sample.answer is not None and sample.prompt[-1]["role"] == "assistant":
        errors.append("has an answer, and an assistant's message as its last one: only one of them can be the answer")
    return errors


def _field(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _validate_sample(item: Any) -> list[str]:
    prompt, answer = _field(item, "prompt"), _field(item, "answer")
    errors = []
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        errors.append(f"must have a prompt, a list of messages, not {_kind(prompt)}")
    else:
        errors += [
            f"prompt[{at}]: {fault}" for at, message in enumerate(prompt) for fault in _validate_message(message)
        ]
    if isinstance(answer, bool) or not isinstance(answer, int | float | str | None):
        errors.append(f"must have an answer that is text, a number or None, not {_kind(answer)}")
    return errors


def _validate_message(message: Any) -> list[str]:
    if not isinstance(message, Mapping):
        return [f"must be a dict of role and content, not {_kind(message)}"]
    role, content = message.get("role"), message.get("content")
    errors = [] if role in _ROLES else [f"unknown role {role!r}{hint(str(role), _ROLES)}"]
    return errors if isinstance(content, str) else [*errors, f"content must be text, not {_kind(content)}"]


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


@dataclass
class BoxedAnswer(EnvBase):
    r"""Rewards the last ``\boxed{}`` of a completion: 1.0 for the same text or number, else 0.0."""

    def get_reward(self, text: str) -> float:
        if self.answer is None:
            raise ValueError("the sample has no answer to compare with")
        boxed = get_boxed_answer(text)
        return float(boxed is not None and same_answer(boxed, str(self.answer)))


class _FileDataset(Sequence[EnvBase]):
    """Problems with an answer, from the rows of a file, a folder or the hub.

    Args:
        path: see :func:`~dlrover.python.rl.data.source.scan_rows`; ``split@`` before it picks a split.
        num_samples: the first samples only; None: all.

    Raises:
        DataError: there is no such source, or rows are invalid.
        ValueError: ``num_samples`` is not positive.
    """

    default_path = ""
    columns: Sequence[str] = ()
    """Names of the problem's column, the preferred one first."""

    def __init__(self, path: str | Path = "", num_samples: int | None = None) -> None:
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be above 0, not {num_samples}")
        rows, errors = scan_rows(path or self.default_path)
        raise_errors(errors)
        count = len(rows) if num_samples is None else min(num_samples, len(rows))
        self._samples = [self._make_sample(rows[number], rows.location(number)) for number in range(count)]

    def _make_sample(self, row: Mapping[str, Any], place: str) -> EnvBase:
        text = next((row[name] for name in self.columns if isinstance(row.get(name), str)), None)
        if text is None or row.get("answer") is None:
            names = ", ".join(self.columns)
            raise DataError(f"{place}: needs one of {names} as text, and 'answer'; it has {', '.join(row)}")
        question = text if "\\boxed" in text else f"{text}\n\nPut the final answer in \\boxed{{}}."
        return BoxedAnswer([{"role": "user", "content": question}], row["answer"])

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index]


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
