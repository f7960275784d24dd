# SPDX-License-Identifier: Apache-2.0
"""A reward function as OpenRLHF loads it: the share of letters in a response."""

from typing import Any


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    (query,), (prompt,) = queries, prompts  # OpenRLHF asks for each response by itself
    response = query[len(prompt) :].partition("<")[0]  # before special tokens
    share = sum(character.isascii() and character.isalpha() for character in response) / max(len(response), 1)
    return {"rewards": share, "scores": share}
