# SPDX-License-Identifier: Apache-2.0
"""A reward function of TRL's kind, which judges a batch."""


def correct(completions: list[str], solution: list[str], **kwargs: object) -> list[float]:
    return [float(answer in completion) for completion, answer in zip(completions, solution, strict=True)]
