"""Several reward functions as one: their weighted sum."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.lookup import load_function

RewardFunction: TypeAlias = Callable[[str, str | None, dict[str, Any]], float | Awaitable[float]]
"""``function(completion, answer, extra_info)``, sync or async."""


@dataclass(frozen=True)
class Reward:
    """What a completion is worth.

    Attributes:
        total: the weighted sum, which the policy is trained on.
        parts: what each function said, without its weight.
    """

    total: float
    parts: dict[str, float]


@dataclass(frozen=True)
class WeightedRewards:
    """Calls every function; a sample that one of them has no reward for has none at all.

    Attributes:
        functions: each by the name it goes by in :attr:`Reward.parts`.
        weights: of the same names.
    """

    functions: Mapping[str, RewardFunction]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.functions or set(self.functions) != set(self.weights):
            raise ValueError(f"each of {sorted(self.functions)} needs a weight, not {sorted(self.weights)}")
        wrong = {name: weight for name, weight in self.weights.items() if not math.isfinite(weight)}
        if wrong:
            raise ValueError(f"weights must be finite, not {wrong}")

    @classmethod
    def load(cls, weights: Mapping[str, float]) -> "WeightedRewards":
        """Import the functions, which go by ``"package.module:function"``.

        Raises:
            VerifierError: there is no such module or function.
        """
        return cls({name: load_function(name) for name in weights}, weights)

    def now(self, completion: str, answer: str | None, extra_info: dict[str, Any]) -> Reward:
        """The reward; sync functions run here one after the other, then async ones all at once in a loop of their own.

        Raises:
            VerifierError: a function returned no finite number.
            Exception: what a function raises.
        """
        said = {name: function(completion, answer, extra_info) for name, function in self.functions.items()}
        waiting = {name: value for name, value in said.items() if inspect.isawaitable(value)}
        if waiting:
            said |= asyncio.run(_together(waiting))
        return self._sum(said)

    async def score(self, completion: str, answer: str | None, extra_info: dict[str, Any]) -> Reward:
        """The same in a loop that goes on meanwhile: sync functions run in threads.

        Raises:
            VerifierError: a function returned no finite number.
            Exception: what a function raises.
        """
        asked = {
            name: asyncio.to_thread(function, completion, answer, extra_info)
            for name, function in self.functions.items()
        }
        said = await _together(asked)
        return self._sum(said | await _together({name: value for name, value in said.items() if _waits(value)}))

    def _sum(self, said: Mapping[str, Any]) -> Reward:
        parts = {name: _number(name, value) for name, value in said.items()}
        return Reward(math.fsum(self.weights[name] * value for name, value in parts.items()), parts)


def _waits(value: Any) -> bool:
    return inspect.isawaitable(value)


async def _together(asked: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))


def _number(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise VerifierError(f"returned {number}, which is no reward: {name}")
    return number
