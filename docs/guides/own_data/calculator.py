# SPDX-License-Identifier: Apache-2.0
"""A tool that computes, and a judge that scores the policy's answer."""

import operator

from dlrover.python.rl.environment.core.rewards import exact_answer

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(first: int, operation: str, second: int) -> int:
    return OPERATIONS[operation](first, second)


def right(completion: str, answer: str | None, extra_info: dict) -> float:
    return exact_answer(completion, str(answer)) - 0.01 * extra_info["tool_calls"]
