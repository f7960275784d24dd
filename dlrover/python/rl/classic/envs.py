# SPDX-License-Identifier: Apache-2.0
"""Samples as environments: a conversation, an answer, and the reward of a completion; their checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dlrover.python.rl.common.names import hint
from dlrover.python.rl.environment.core.rewards import boxed_answer as get_boxed_answer
from dlrover.python.rl.environment.verifiers.arithmetic import EnvBase

__all__ = ["EnvBase", "LoadedSample", "SampleDataset", "get_boxed_answer", "load_samples"]

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
