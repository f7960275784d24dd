# SPDX-License-Identifier: Apache-2.0
"""Halves of surrogate pairs, which JSON may have alone ("\\ud83d") and no tokenizer takes."""

import re
from collections.abc import Iterator
from typing import Any

_LONE = re.compile("[\ud800-\udfff]")


def surrogate_faults(name: str, value: Any) -> list[str]:
    """A fault for each text in ``value``, plain data, with a lone surrogate; characters are counted from 1."""
    where = f"'{name}' has" if isinstance(value, str) else f"a text in '{name}' has"
    found = (_LONE.search(text) for text in _texts(value))
    return [f"{where} a lone surrogate at character {match.start() + 1}" for match in found if match]


def replace_surrogates(value: Any) -> Any:
    """Return plain data with U+FFFD in the place of each lone surrogate, and tuples as lists; other objects in it stay
    as they are."""
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return [replace_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
