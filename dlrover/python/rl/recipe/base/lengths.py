# SPDX-License-Identifier: Apache-2.0
"""Lengths before a run starts: the tokens that a model has positions for, and the rows that may have more."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_info
from dlrover.python.rl.engine.model.loading import load_tokenizer
from dlrover.python.rl.engine.model.model_shape import count_positions, find_config_file, read_config

T = TypeVar("T")

LARGEST = 1000
"""Rows of a file that a check encodes at most, the largest ones; a run encodes all."""

_OPENING, _TEMPLATE = 2, 256
"""Tokens that a tokenizer may add to a text, and a chat template to a conversation beyond the bytes of its JSON."""


def count_room(cfg: Any, generates: bool = False) -> int | None:
    """The most tokens of a sequence by the model and, if it ``generates``, the option of the rollout engine; None:
    unknown."""
    option = engine_info(ROLLOUT_ENGINES, cfg.engine.rollout).limit_option if generates else ""
    limits = [count_positions(read_config(cfg.model, cfg.model_config)), cfg.engine.rollout_options.get(option)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def find_large(rows: Iterable[T], content: Callable[[T], Any], limit: int) -> list[T]:
    """The rows that may have more than ``limit`` tokens, the largest first: a token is at least a byte of its text."""
    sized = [(_count_bytes(content(row)), number, row) for number, row in enumerate(rows)]
    large = sorted((item for item in sized if item[0] > limit), key=lambda item: (-item[0], item[1]))
    return [row for _, _, row in large[:LARGEST]]


def _count_bytes(content: Any) -> int:
    is_text = isinstance(content, str)
    text = content if is_text else json.dumps(content, ensure_ascii=False, default=str)
    return len(text.encode(errors="replace")) + (_OPENING if is_text else _TEMPLATE)


@cache
def find_tokenizer(model: str) -> Any:
    """The tokenizer of a model in a folder or in the hub's cache; None if it is elsewhere or cannot be loaded."""
    file = find_config_file(model)
    try:
        return None if file is None else load_tokenizer(file.parent)
    except EngineError:  # the engine reports it
        return None
