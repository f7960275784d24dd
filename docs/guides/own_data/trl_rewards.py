# SPDX-License-Identifier: Apache-2.0
"""A reward function of TRL's kind, which judges a batch, as one that judges a sample."""


def correct(completions: list[str], solution: list[str], **kwargs: object) -> list[float]:
    """As TRL calls it."""
    return [float(answer in completion) for completion, answer in zip(completions, solution, strict=True)]


def reward(completion: str, answer: str | None, extra_info: dict) -> float:
    """As it is called here."""
    return correct([completion], [answer or ""])[0]
