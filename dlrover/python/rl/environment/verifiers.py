"""Reward functions by name: ``function(completion, answer, extra_info)`` gives a number."""

from typing import Any

from dlrover.python.rl.environment.answers import exact_answer


def exact(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    """1.0 when the completion gives the answer, else 0.0; see
    :func:`~dlrover.python.rl.environment.answers.exact_answer`.

    Raises:
        ValueError: the problem has no answer.
    """
    if answer is None:
        raise ValueError("the problem has no answer to compare with")
    return exact_answer(completion, answer)


def unjudged(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    """0.0, whatever the completion: for training that learns nothing from rewards."""
    return 0.0
