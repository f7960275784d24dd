"""The environment port: what answers the policy's actions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.common.nearest import hint

LONGEST_STATE = 4_000_000
"""Characters of a state; a longer one is a fault of the environment."""


@dataclass(frozen=True)
class StepResult:
    """What one action led to."""

    next_state: str | None
    """The text the policy acts on next; None when ``done``."""

    reward: float
    """What the policy is trained on: it is credited to the last token of the action, and summed over turns."""

    score: float
    """What people read in the metrics (solved or not, say); summed over turns, never trained on."""

    done: bool
    """The episode is over."""

    extra_info: dict[str, Any] = field(default_factory=dict)
    """The user's data for the next step."""


class Environment(Protocol):
    """Text in, text out. One instance serves many episodes at once, so an episode's state travels in its arguments."""

    async def reset(self, extra_info: dict[str, Any]) -> str | None:
        """Begin an episode: the first state; None where the row's prompt is that.

        What it puts into ``extra_info`` is there in the steps: a number by which to find the episode again, say.
        """
        ...

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        """Answer one action.

        Args:
            state: the text the policy acted on.
            action: the text it wrote.
            extra_info: the row's data at first, then what the last step returned.
        """
        ...

    async def close(self, extra_info: dict[str, Any]) -> None:
        """An episode is over: it was done, or came to the limit of turns, or failed. Called once for each."""
        ...

    async def shutdown(self) -> None:
        """Release everything held; called once, whether episodes ended or not."""
        ...


_FIELDS = tuple(item.name for item in fields(StepResult))


def step_result(returned: Any, extra_info: dict[str, Any]) -> StepResult:
    """What a step returned, checked: a :class:`StepResult`, or a dict of its fields.

    ``reward`` must be there; ``score`` is the reward by default, ``done`` False, ``extra_info`` the one given. Numbers
    and truth values of NumPy and torch will do: ``reward=x.mean()``, ``done=x.max() > 0``.

    Raises:
        EnvironmentFailed: it is neither, or a field is not what it should be.
    """
    if isinstance(returned, StepResult):
        given: dict[str, Any] = {name: getattr(returned, name) for name in _FIELDS}
    elif isinstance(returned, Mapping):
        given = dict(returned)
    else:
        raise EnvironmentFailed(f"step returned {_kind(returned)}, not a StepResult or a dict of its fields")
    for name in given:
        if name not in _FIELDS:
            raise EnvironmentFailed(f"step returned an unknown field '{name}'{hint(str(name), _FIELDS)}")
    reward = _number("reward", given.get("reward"))
    score = _number("score", given.get("score", reward))
    done, info = _scalar(given.get("done", False)), given.get("extra_info", extra_info)
    if not isinstance(done, bool):
        raise EnvironmentFailed(f"step returned {_kind(done)} as 'done', not True or False: {str(done)[:100]}")
    if not isinstance(info, dict):
        raise EnvironmentFailed(f"step returned {_kind(info)} as 'extra_info'")
    next_state = given.get("next_state")
    if next_state is None and not done:
        raise EnvironmentFailed("step returned no 'next_state', and is not done")
    return StepResult(None if done else state_text("next_state", next_state), reward, score, done, info)


def state_text(name: str, value: Any) -> str:
    """A state that a policy can act on.

    Raises:
        EnvironmentFailed: it is no text, or too long.
    """
    if not isinstance(value, str):
        raise EnvironmentFailed(f"{name} is {_kind(value)}, not text")
    if len(value) > LONGEST_STATE:
        raise EnvironmentFailed(f"{name} has {len(value)} characters, {LONGEST_STATE} at most")
    return value


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFailed(f"step returned {_kind(value)} as '{name}', not a number") from None
    if not math.isfinite(number):
        raise EnvironmentFailed(f"step returned {number} as '{name}'")
    return number


def _scalar(value: Any) -> Any:
    """What an array or a tensor without axes holds; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def _kind(value: Any) -> str:
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return "None" if value is None else f"{where}{kind.__qualname__}"
