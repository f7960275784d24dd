"""Mental arithmetic: a task that needs no download, with a reward that tells near from far."""

import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, overload

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.environment.answers import boxed_answer, decimal_value
from dlrover.python.rl.environment.base import StepResult

Operand: TypeAlias = Literal["add", "mult", "substraction", "subtraction", "division"]
"""The operation asked for; ``substraction`` is another spelling of ``subtraction``."""

WORST_REWARD = -1e6
"""The reward of an answer that cannot be read, or is wrong by 1000 and more."""

_SYMBOLS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", operator.add),
    "mult": ("*", operator.mul),
    "subtraction": ("-", operator.sub),
    "substraction": ("-", operator.sub),
    "division": ("/", operator.floordiv),
}


@dataclass
class EnvBase:
    """One problem that rewards a completion; subclasses say how."""

    prompt: list[dict[str, str]]
    """Messages, ``{"role": ..., "content": ...}``."""

    answer: int | float | str | None = None
    """The reference answer, where there is one."""

    def get_reward(self, text: str) -> float:
        """The reward of the completion ``text``; higher is better."""
        raise NotImplementedError(f"{type(self).__name__} must define get_reward(text)")


@dataclass
class ArithmeticProblem(EnvBase):
    """One question whose answer is a whole number."""

    answer: int = 0

    @property
    def question(self) -> str:
        """The text that is asked."""
        return self.prompt[-1]["content"]

    def get_reward(self, text: str) -> float:
        r"""Minus the squared error of the last ``\boxed{}`` number, at least -10^6; 0 for the exact answer alone."""
        boxed = boxed_answer(text)
        value = None if boxed is None else decimal_value(boxed)
        if value is None:
            return WORST_REWARD
        if value == self.answer:
            return 0.0
        error = float(value) - self.answer
        # The square of a small error may round to the reward of the exact answer.
        return max(-max(error * error, 1e-12), WORST_REWARD)


class MathDataset(Sequence[ArithmeticProblem]):
    """Random problems ``a op b``; the same arguments give the same problems.

    Args:
        num_samples: how many.
        min_val: smallest number drawn.
        max_val: largest number drawn.
        operand: the operation. For ``division`` the divisor and the quotient are drawn, so that the answer is whole.
        seed: another seed is another set.

    Raises:
        ValueError: unknown ``operand``, a negative count, an empty range, or a division with no divisor but 0.
    """

    def __init__(
        self, num_samples: int = 200, min_val: int = 0, max_val: int = 200, operand: Operand = "add", seed: int = 0
    ) -> None:
        if operand not in _SYMBOLS:
            raise ValueError(f"unknown operand '{operand}'{hint(operand, _SYMBOLS)}")
        if num_samples < 0 or min_val > max_val:
            raise ValueError(f"cannot draw {num_samples} samples from {min_val} to {max_val}")
        if operand == "division" and min_val == max_val == 0:
            raise ValueError("cannot divide by 0, the only number from 0 to 0")
        rng = random.Random(seed)
        self._problems = [_draw(rng, min_val, max_val, operand) for _ in range(num_samples)]

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> ArithmeticProblem: ...

    @overload
    def __getitem__(self, index: slice) -> list[ArithmeticProblem]: ...

    def __getitem__(self, index: int | slice) -> ArithmeticProblem | list[ArithmeticProblem]:
        return self._problems[index]

    def __iter__(self) -> Iterator[ArithmeticProblem]:
        return iter(self._problems)


class ArithmeticEnvironment:
    """One turn: a question of ``dataset``, the policy's answer, its reward. ``score`` is 1.0 for the exact answer.

    Args:
        dataset: where questions come from.

    Raises:
        ValueError: the dataset is empty.
    """

    def __init__(self, dataset: Sequence[ArithmeticProblem]) -> None:
        if not dataset:
            raise ValueError("an environment needs a dataset with at least one problem")
        self._dataset = dataset
        self._by_question = {problem.question: problem for problem in dataset}
        self._next = 0

    async def reset(self, extra_info: dict[str, Any]) -> str:
        """The question of row ``extra_info["idx"]`` modulo the dataset's size; by default, of the next row."""
        index = extra_info.get("idx")
        if index is None:
            index, self._next = self._next, self._next + 1
        return self._dataset[index % len(self._dataset)].question

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        """Reward ``action`` as the answer to the question ``state``.

        Raises:
            DataError: ``state`` is no question of this environment.
        """
        problem = self._by_question.get(state)
        if problem is None:
            raise DataError(f"no question of this environment: {state[:200]!r}")
        reward = problem.get_reward(action)
        return StepResult(next_state=None, reward=reward, score=float(reward == 0.0), done=True, extra_info=extra_info)

    async def close(self, extra_info: dict[str, Any]) -> None:
        """An episode holds nothing."""

    async def shutdown(self) -> None:
        """Nothing is held."""


def _draw(rng: random.Random, low: int, high: int, operand: str) -> ArithmeticProblem:
    first, second = rng.randint(low, high), rng.randint(low, high)
    if operand == "division":
        while second == 0:
            second = rng.randint(low, high)
        first *= second
    symbol, compute = _SYMBOLS[operand]
    question = f"What is {first} {symbol} {second}? Put the final answer in \\boxed{{}}."
    return ArithmeticProblem([{"role": "user", "content": question}], compute(first, second))
