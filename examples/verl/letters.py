# SPDX-License-Identifier: Apache-2.0
"""A reward function as verl loads it: the share of letters in a response."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return sum(character.isascii() and character.isalpha() for character in solution_str) / max(len(solution_str), 1)
