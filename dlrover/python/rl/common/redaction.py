# SPDX-License-Identifier: Apache-2.0
"""The secrets that this process knows, kept out of what it writes for people."""

import threading
from collections.abc import Iterable

HIDDEN = "***"
_SHORTEST = 6
"""A shorter value may be anything, and hiding it would spoil texts."""

_lock = threading.Lock()
_known: tuple[str, ...] = ()  # the longest first, since one may be a part of another


def hide_values(values: Iterable[str]) -> None:
    """From now on :func:`redacted` hides them, their lines, and what ``repr`` makes of them, in this process."""
    global _known  # noqa: PLW0603 -- what a process must not tell is one set for all of it
    with _lock:
        forms = {form for value in values for text in (value, *value.splitlines()) for form in _forms(text)}
        fresh = {form for form in forms if len(form) >= _SHORTEST and form != HIDDEN}
        _known = tuple(sorted({*_known, *fresh}, key=len, reverse=True))


def _forms(text: str) -> tuple[str, ...]:
    return text, text.strip(), repr(text)[1:-1]


def redacted(text: str) -> str:
    for value in _known:
        text = text.replace(value, HIDDEN)
    return text


def redacted_bytes(data: bytes) -> bytes:
    for value in _known:
        data = data.replace(value.encode(), HIDDEN.encode())
    return data
