# SPDX-License-Identifier: Apache-2.0
"""Your own reward function."""

from typing import Any


def short_and_right(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    """1 for the answer alone, half for the answer among other text, else 0."""
    if completion.strip() == answer:
        return 1.0
    return 0.5 if answer and answer in completion else 0.0
