# SPDX-License-Identifier: Apache-2.0
"""Text that this process writes for people: log lines in one format, without the secrets that it knows, and output of
jobs, models and services that cannot move a terminal's cursor, set its title or reverse other text."""

import logging
import re
import sys
import threading
from collections.abc import Iterable

HIDDEN = "***"
_SHORTEST = 6  # a shorter value may be anything, and hiding it would spoil texts
_lock = threading.Lock()
_known: tuple[str, ...] = ()  # the longest first, since one may be a part of another

_ROOT = "dlrover"
_FORMAT = "%(asctime)s %(levelname).1s %(message)s"
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_ACTIVE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def inert(text: str) -> str:
    """Return ``text`` without colours, with ``\\x1b`` or ``\\u202e`` for each character that a terminal would obey:
    controls but for tabs and ends of lines, and marks that change the direction of text."""
    lines = _COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _ACTIVE.sub(lambda character: character[0].encode("unicode_escape").decode(), lines)


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print ``text``, which may come from a job, to stdout or stderr."""
    import click  # child processes need this module without it

    click.echo(inert(text), err=err, nl=nl)  # noqa: TID251 -- the one place that prints


def hide_values(values: Iterable[str]) -> None:
    """Let :func:`redacted` hide them, their lines, and what ``repr`` makes of them, from now on in this process."""
    global _known  # noqa: PLW0603 -- what a process must not tell is one set for all of it
    with _lock:
        texts = [text for value in values for text in (value, *value.splitlines())]
        forms = {form for text in texts for form in (text, text.strip(), repr(text)[1:-1])}
        fresh = {form for form in forms if len(form) >= _SHORTEST and form != HIDDEN}
        _known = tuple(sorted({*_known, *fresh}, key=len, reverse=True))


def redacted(text: str) -> str:
    for value in _known:
        text = text.replace(value, HIDDEN)
    return text


def redacted_bytes(data: bytes) -> bytes:
    for value in _known:
        data = data.replace(value.encode(), HIDDEN.encode())
    return data


def get_logger(module: str) -> logging.Logger:
    return logging.getLogger(module)


def cut_middle(text: str, limit: int, cut: str = " [...] ") -> str:
    """``text`` with at most ``limit`` characters: the middle of a longer one is left out."""
    half = (limit - len(cut)) // 2
    return text if len(text) <= limit else f"{text[:half]}{cut}{text[-half:]}"


def valid_text(text: str) -> str:
    """``text`` with ``?`` for each lone surrogate ("\\ud83d"): UTF-8, in which Ray and gRPC send, has none."""
    return text.encode("utf-8", "replace").decode()


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return inert(redacted(super().format(record)))


def configure_logging(process: str = "", level: int = logging.INFO) -> None:
    """Send this package's log lines to stderr, each behind ``[process]``. A second call replaces the first."""
    logger = logging.getLogger(_ROOT)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"[{process}] {_FORMAT}" if process else _FORMAT, datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def short_number(number: float) -> str:
    """Three digits and a decimal prefix: ``1.24 G``."""
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g} {prefix}"
    return f"{number:g} "
