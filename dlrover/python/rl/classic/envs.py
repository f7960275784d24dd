# SPDX-License-Identifier: Apache-2.0
"""Samples that are environments: a conversation, an answer, and the reward of a completion.

::

    data set -> load_samples -> write_samples: train.jsonl           -> a recipe: prompts, answers
                             -> write_rewards: its reward function   -> its verifier's process: get_reward(completion)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from dlrover.python.rl.common.by_value import name_of_file
from dlrover.python.rl.common.disk_space import replace
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.environment.core.rewards import boxed_answer as get_boxed_answer
from dlrover.python.rl.environment.verifiers.arithmetic import EnvBase

__all__ = ["EnvBase", "LoadedSample", "SampleDataset", "get_boxed_answer", "load_samples"]

_ROLES = ("system", "user", "assistant")
_MAX_ERRORS = 20


class SampleDataset(Protocol):
    """A list, or a map-style data set of PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class LoadedSample:
    """A checked sample: its messages, its reference answer, and the data set's object."""

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
        dataset: :class:`EnvBase` objects, other objects with ``prompt`` and ``answer``, or dicts of these.
        rewards: each sample must have ``get_reward``.
        answers: each sample must have an answer, or an assistant's message.

    Raises TypeError if the data set cannot be indexed, ValueError if it is empty or has invalid samples.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"{name} must have a length and a sample for each number, like a list")
    samples: list[LoadedSample] = []
    errors: list[str] = []
    for number in range(len(dataset)):
        item = dataset[number]
        get = item.get if isinstance(item, Mapping) else partial(getattr, item)
        prompt, answer = get("prompt", None), get("answer", None)
        faults = _validate_prompt(prompt)
        if isinstance(answer, bool) or not isinstance(answer, int | float | str | None):
            faults.append(f"must have an answer that is text, a number or None, not {_kind(answer)}")
        if not faults:
            messages = [{key: each[key] for key in ("role", "content")} for each in prompt]
            sample, is_answered = LoadedSample(messages, answer, item), messages[-1]["role"] == "assistant"
            samples.append(sample)
            if rewards and not sample.has_reward:
                faults.append(f"has no reward: {type(item).__name__} must define get_reward(text)")
            if answers and answer is None and all(message["role"] != "assistant" for message in messages):
                faults.append("has nothing to train on: neither an answer nor an assistant's message")
            if answers and answer is not None and is_answered:
                faults.append("has both an answer and an assistant's message at the end: only one can be the answer")
        errors += [f"{name}[{number}] {fault}" for fault in faults]
    if errors:
        more = [f"and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
        raise ValueError("; ".join([*errors[:_MAX_ERRORS], *more]))
    if not samples:
        raise ValueError(f"{name} is empty")
    return samples


def _validate_prompt(prompt: Any) -> list[str]:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return [f"must have a prompt, a list of messages, not {_kind(prompt)}"]
    errors = []
    for at, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            errors.append(f"prompt[{at}]: must be a dict of role and content, not {_kind(message)}")
            continue
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            errors.append(f"prompt[{at}]: unknown role {role!r}{hint(str(role), _ROLES)}")
        if not isinstance(content, str):
            errors.append(f"prompt[{at}]: content must be text, not {_kind(content)}")
    return errors


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def write_rewards(folder: Path, splits: Mapping[str, Sequence[LoadedSample]], empty_reward: float | None = None) -> str:
    """Write the environments of samples, and return the name of the reward function that calls them, except for an
    empty completion if there is an ``empty_reward``. Raises TypeError if an environment cannot be pickled."""
    environments = {
        split: [sample.environment if sample.has_reward else None for sample in samples]
        for split, samples in splits.items()
    }

    def score(completion: str, answer: str | None, extra_info: Mapping[str, Any]) -> float:
        environment = environments[extra_info["split"]][extra_info["number"]]
        if environment is None:
            raise ValueError("this sample has no get_reward")
        if not completion and empty_reward is not None:
            return empty_reward
        return float(environment.get_reward(completion))

    try:
        content: bytes = cloudpickle.dumps(score)
    except Exception as error:  # pickling calls the objects' code
        names = " and ".join(splits)
        raise TypeError(f"the samples of {names} cannot be pickled: {type(error).__name__}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "get_reward-environments.pickle"  # messages name the part before the hyphen
    replace(file, content)
    return name_of_file(file)


def write_samples(folder: Path, split: str, samples: Sequence[LoadedSample], scored: bool = False) -> str:
    """Write a data set for a recipe, and return the path of its file; ``scored`` rows refer to their environments."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, sample in enumerate(samples):
        answer = {} if sample.answer is None else {"answer": str(sample.answer)}
        reference = {"extra_info": {"split": split, "number": number}} if scored else {}
        lines.append(json.dumps({"messages": sample.prompt, **answer, **reference}) + "\n")
    file = folder.absolute() / f"{split}.jsonl"
    replace(file, "".join(lines).encode())
    return str(file)
