# SPDX-License-Identifier: Apache-2.0
"""The interface of environments, which answer the policy's actions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.jsonl import find_message_faults, normalize_message, replace_surrogates
from dlrover.python.rl.environment.core.messages import Message, State

MAX_STATE_LENGTH = 4_000_000  # characters; a longer state is an error of the environment


@dataclass(frozen=True)
class StepResult:
    #: the policy's next input, in a conversation the messages after the policy's; None if ``done``
    next_state: State | None
    reward: float  #: the training signal, on the last token of the action; summed over turns
    score: float  #: for metrics only (solved or not); summed over turns
    done: bool  #: the episode has ended
    extra_info: dict[str, Any] = field(default_factory=dict)  #: the user's data for the next step


@dataclass(frozen=True)
class EnvironmentTraits:
    """Traits that an environment declares by attributes with these names."""

    episodes: int | None = None  #: maximum episodes at a time; None: any number
    #: it gets prompts of messages as messages; False: as text of the chat template
    uses_messages: bool = False
    #: arguments of the model's chat template, such as ``tools``
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Any) -> "EnvironmentTraits":
        declared = getattr(target, "traits", None)
        if isinstance(declared, cls):
            return declared
        return cls(**{item.name: getattr(target, item.name) for item in fields(cls) if hasattr(target, item.name)})


class Environment(Protocol):
    """Text in, text out. One instance serves many episodes at once, so arguments carry an episode's state.

    An episode is a conversation, in which states and actions are messages, if ``reset`` returns messages, or if it
    returns None for a prompt of messages and the environment ``uses_messages``."""

    async def reset(self, extra_info: dict[str, Any]) -> State | None:
        """Start an episode: return the first state, or None for the row's prompt. ``extra_info`` may be changed."""

    async def step(self, state: State, action: str | Message, extra_info: dict[str, Any]) -> StepResult:
        """Answer ``action``, the policy's for ``state``; ``extra_info`` comes from the row or from the last step."""

    async def close(self, extra_info: dict[str, Any]) -> None:
        """End an episode: finished, at the limit of turns, or failed. Called once for each."""

    async def shutdown(self) -> None:
        """Release all resources; called once, even if episodes are open."""


_FIELDS = tuple(item.name for item in fields(StepResult))


def validate_step(returned: Any, extra_info: dict[str, Any], needs_state: bool = True) -> StepResult:
    """Check a step's result, a :class:`StepResult` or a dict of its fields.

    ``reward`` is required; ``score`` defaults to it, ``done`` to False, ``extra_info`` to the argument. NumPy and torch
    scalars are accepted. A key ``next_state`` with None ends the episode, as in RL2; with ``needs_state`` a step that
    is not done must have one."""
    if isinstance(returned, StepResult):
        values: dict[str, Any] = {name: getattr(returned, name) for name in _FIELDS}
    elif isinstance(returned, Mapping):
        values = dict(returned)
    else:
        raise EnvironmentFailed(f"step returned {_kind(returned)}, not a StepResult or a dict of its fields")
    for name in values:
        if name not in _FIELDS:
            raise EnvironmentFailed(f"step returned an unknown field '{name}'{hint(str(name), _FIELDS)}")
    reward = _number("reward", values.get("reward"))
    score = _number("score", values.get("score", reward))
    done, info = values.get("done", False), values.get("extra_info", extra_info)
    done = done.item() if getattr(done, "shape", None) == () else done
    if not isinstance(done, bool):
        raise EnvironmentFailed(f"step returned {_kind(done)} as 'done', not True or False: {str(done)[:100]}")
    if not isinstance(info, dict):
        raise EnvironmentFailed(f"step returned {_kind(info)} as 'extra_info'")
    next_state = values.get("next_state")
    done = done or (isinstance(returned, Mapping) and "next_state" in returned and next_state is None)
    if next_state is None and not done and needs_state:
        raise EnvironmentFailed("step returned no 'next_state', and is not done (rollout.env_missing_state: done)")
    is_over = done or next_state is None
    return StepResult(None if is_over else validate_state("next_state", next_state), reward, score, done, info)


def validate_state(name: str, value: Any) -> State:
    """Return text, or normalised messages, with U+FFFD for each lone surrogate."""
    if isinstance(value, list):
        plain: Any = [normalize_message(message) for message in replace_surrogates(value)]
        if faults := find_message_faults(plain, name):
            raise EnvironmentFailed("; ".join(faults)[:2_000])
        length = sum(len(message["content"]) for message in plain)
    elif isinstance(value, str):
        plain, length = replace_surrogates(value), len(value)
    else:
        raise EnvironmentFailed(f"{name} is {_kind(value)}, not text or a list of messages")
    if length > MAX_STATE_LENGTH:
        raise EnvironmentFailed(f"{name} has {length} characters, {MAX_STATE_LENGTH} at most")
    return plain  # type: ignore[no-any-return]


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFailed(f"step returned {_kind(value)} as '{name}', not a number") from None
    if not math.isfinite(number):
        raise EnvironmentFailed(f"step returned {number} as '{name}'")
    return number


def _kind(value: Any) -> str:
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return "None" if value is None else f"{where}{kind.__qualname__}"
