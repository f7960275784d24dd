# SPDX-License-Identifier: Apache-2.0
"""Mental arithmetic: a task that needs no download, with a reward that grows with the accuracy."""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dlrover.python.rl.common.names import hint
from dlrover.python.rl.environment.core.rewards import boxed_answer, decimal_value

Operand: TypeAlias = Literal["add", "mult", "substraction", "subtraction", "division"]
"""The operation; ``substraction`` is another spelling of ``subtraction``."""

MAX_ERROR, INVALID_PENALTY = 100.0, 1.0
"""Limit of the squared error, and the additional penalty of an answer without a number, which must not outweigh all
differences of its group: RLFusion's ``max_error`` and ``invalid_penalty``."""

_SYMBOLS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", operator.add),
    "mult": ("*", operator.mul),
    "subtraction": ("-", operator.sub),
    "substraction": ("-", operator.sub),
    "division": ("/", operator.floordiv),
}


@dataclass
class EnvBase:
    """A prompt that rewards a completion; subclasses define the reward."""

    prompt: list[dict[str, str]]  #: messages, ``{"role": ..., "content": ...}``
    answer: int | float | str | None = None  #: the reference answer, where there is one

    def get_reward(self, text: str) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define get_reward(text)")


@dataclass
class ArithmeticProblem(EnvBase):
    answer: int = 0

    @property
    def question(self) -> str:
        return self.prompt[-1]["content"]

    def get_reward(self, text: str) -> float:
        r"""Return minus the squared error of the last ``\boxed{}`` number, at least -100; -101 without a number."""
        boxed = boxed_answer(text)
        value = None if boxed is None else decimal_value(boxed)
        if value is None:
            return -(MAX_ERROR + INVALID_PENALTY)
        if value == self.answer:
            return 0.0
        error = float(value) - self.answer
        return -min(max(error * error, 1e-12), MAX_ERROR)  # not 0, to which a small square may round


class MathDataset(list[ArithmeticProblem]):
    """Random questions ``a op b`` with numbers from ``min_val`` to ``max_val``; the same arguments give the same
    questions. The quotient of a ``division`` is such a number, hence whole."""

    def __init__(
        self, num_samples: int = 200, min_val: int = 0, max_val: int = 200, operand: Operand = "add", seed: int = 0
    ) -> None:
        if operand not in _SYMBOLS:
            raise ValueError(f"unknown operand '{operand}'{hint(operand, _SYMBOLS)}")
        if num_samples < 0 or min_val > max_val:
            raise ValueError(f"cannot sample {num_samples} questions with numbers from {min_val} to {max_val}")
        if operand == "division" and min_val == max_val == 0:
            raise ValueError("cannot divide by 0, the only number from 0 to 0")
        rng, (symbol, compute) = random.Random(seed), _SYMBOLS[operand]
        for _ in range(num_samples):
            first, second = rng.randint(min_val, max_val), rng.randint(min_val, max_val)
            while operand == "division" and second == 0:
                second = rng.randint(min_val, max_val)
            first *= second if operand == "division" else 1
            question = f"What is {first} {symbol} {second}? Put the final answer in \\boxed{{}}."
            self.append(ArithmeticProblem([{"role": "user", "content": question}], compute(first, second)))
