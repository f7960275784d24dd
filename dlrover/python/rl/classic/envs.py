"""Samples as environments: a conversation, an answer, and what a completion is worth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.environment.answers import boxed_answer as get_boxed_answer
from dlrover.python.rl.environment.arithmetic import EnvBase

__all__ = ["EnvBase", "Samples", "Taken", "get_boxed_answer", "take"]

_ROLES = ("system", "user", "assistant")
_SHOWN = 20


class Samples(Protocol):
    """What a data set has: PyTorch's do, and lists."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Taken:
    """A sample of a data set, checked.

    Attributes:
        prompt: messages.
        answer: the reference answer, or None.
        environment: what the data set gave.
    """

    prompt: list[dict[str, str]]
    answer: int | float | str | None
    environment: Any

    @property
    def rewards(self) -> bool:
        """Whether it says what a completion is worth."""
        own = getattr(type(self.environment), "get_reward", None)
        return own is not None and own is not EnvBase.get_reward


def take(dataset: Samples, name: str, rewards: bool = False, answers: bool = False) -> list[Taken]:
    """Every sample of a data set, each asked for once.

    Args:
        dataset: of :class:`EnvBase` objects, others with ``prompt`` and ``answer``, or dicts of these.
        name: what errors call it.
        rewards: each of them must have ``get_reward``.
        answers: each of them must have an answer, or an assistant's message.

    Raises:
        TypeError: it has no length, or cannot be asked by number.
        ValueError: it is empty, or samples are not what they should be; names each by its number (20 at most).
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"{name} must have a length and give a sample for each number, as a list does")
    taken: list[Taken] = []
    faults: list[str] = []
    for number in range(len(dataset)):
        sample = dataset[number]
        found = _faults(sample)
        if not found:
            taken.append(_taken(sample))
            found = _missing(taken[-1], rewards, answers)
        faults += [f"{name}[{number}] {fault}" for fault in found]
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise ValueError("; ".join([*faults[:_SHOWN], *more]))
    if not taken:
        raise ValueError(f"{name} is empty")
    return taken


def _missing(taken: Taken, rewards: bool, answers: bool) -> list[str]:
    found = []
    if rewards and not taken.rewards:
        found.append(f"has no reward: {type(taken.environment).__name__} must define get_reward(text)")
    if answers and taken.answer is None and all(message["role"] != "assistant" for message in taken.prompt):
        found.append("has nothing to learn: neither an answer nor an assistant's message")
    return found


def _taken(sample: Any) -> Taken:
    prompt, answer = _field(sample, "prompt"), _field(sample, "answer")
    messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
    return Taken(messages, answer, sample)


def _field(sample: Any, name: str) -> Any:
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)


def _faults(sample: Any) -> list[str]:
    prompt, answer = _field(sample, "prompt"), _field(sample, "answer")
    faults = []
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        faults.append(f"must have a prompt, a list of messages, not {_kind(prompt)}")
    else:
        faults += [f"prompt[{at}]: {fault}" for at, message in enumerate(prompt) for fault in _message_faults(message)]
    if isinstance(answer, bool) or not isinstance(answer, int | float | str | None):
        faults.append(f"must have an answer that is text, a number or None, not {_kind(answer)}")
    return faults


def _message_faults(message: Any) -> list[str]:
    if not isinstance(message, Mapping):
        return [f"must be a dict of role and content, not {_kind(message)}"]
    role, content = message.get("role"), message.get("content")
    faults = [] if role in _ROLES else [f"unknown role {role!r}{hint(str(role), _ROLES)}"]
    return faults if isinstance(content, str) else [*faults, f"content must be text, not {_kind(content)}"]


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
