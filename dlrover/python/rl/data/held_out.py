"""Rows to evaluate on, which are never trained on."""

import json
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from dlrover.python.rl.common.errors import DataError

SHARE = 0.03
"""Held out of a data set when nothing else is asked for."""


def hold_out(prompts: Sequence[Any], size: int | float = SHARE, seed: int = 0) -> tuple[list[int], list[int]]:
    """Choose rows to evaluate on, by a hash of seed and prompt: equal prompts always land on the same side.

    Args:
        prompts: of each row what it asks: text, or messages.
        size: rows to hold out: a count (``int``) or a fraction of the rows (``float``, below 1, rounded, at least one
            row). More are held out only where the last prompt chosen has copies.
        seed: another seed is another choice.

    Returns:
        Indices of the rows to train on and of those held out, both rising.

    Raises:
        ValueError: ``size`` is no fraction or count that leaves a row on each side.
        DataError: the copies of the chosen prompts are all the rows.
    """
    if isinstance(size, float):
        if not 0 < size < 1:
            raise ValueError(f"a held-out fraction lies between 0 and 1, not {size:g}")
        size = max(1, round(size * len(prompts)))
    if not 0 < size < len(prompts):
        raise ValueError(f"{size} of {len(prompts)} rows cannot be held out: both sides need a row")
    copies: dict[bytes, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        copies[_digest(prompt, seed)].append(index)
    held: list[int] = []
    for digest in sorted(copies):
        if len(held) >= size:
            break
        held += copies[digest]
    if len(held) == len(prompts):
        raise DataError("the rows repeat too few prompts to hold any out: nothing would be left to train on")
    chosen = set(held)
    return [index for index in range(len(prompts)) if index not in chosen], sorted(held)


def _digest(prompt: Any, seed: int) -> bytes:
    return blake2b(json.dumps([seed, prompt], sort_keys=True).encode(), digest_size=16).digest()
