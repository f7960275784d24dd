# SPDX-License-Identifier: Apache-2.0
"""Reward functions by name: ``function(completion, answer, extra_info)`` gives a number."""

from typing import Any

from dlrover.python.rl.data.model_text import ignore_thoughts
from dlrover.python.rl.environment.core.rewards import exact_answer, same_final_number
from dlrover.python.rl.environment.core.scoring import needs


@needs("answer")
@ignore_thoughts
def exact(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    return exact_answer(completion, answer or "")


@needs("answer")
@ignore_thoughts
def gsm8k(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    return same_final_number(completion, answer or "")


@needs("answer")
@ignore_thoughts
def math(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    # Imported on demand: math-verify is an extra.
    from dlrover.python.rl.environment.verifiers.math_answers import math_equal

    return float(math_equal.score_whole(completion, answer, extra_info))


def unjudged(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    """Score nothing, for training without rewards."""
    return 0.0
