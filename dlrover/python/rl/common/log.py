# SPDX-License-Identifier: Apache-2.0
"""Text that this process writes for people: log lines in one format, without secrets, and output of jobs, models and
services that cannot control a terminal."""

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterable

HIDDEN = "***"
_SHORTEST = 6  # shorter secrets are not hidden: they may be parts of ordinary words
_lock = threading.Lock()
_secrets: tuple[str, ...] = ()  # the longest first, since one may be a part of another

_ROOT = "dlrover"
_FORMAT = "%(asctime)s %(levelname).1s %(message)s"
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_ACTIVE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def inert(text: str) -> str:
    """Return ``text`` without colours, with an escape such as ``\\x1b`` for each character that controls a terminal:
    control characters other than tabs and line ends, and marks that change the direction of text."""
    lines = _COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _ACTIVE.sub(lambda character: character[0].encode("unicode_escape").decode(), lines)


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print ``text``, which may come from a job, to stdout or stderr."""
    import click  # child processes need this module without it

    click.echo(inert(text), err=err, nl=nl)  # noqa: TID251 -- the one place that prints


def hide_values(values: Iterable[str]) -> None:
    """Let :func:`redacted` hide ``values``, their lines, and both in the form of ``repr``, in this process."""
    global _secrets  # noqa: PLW0603 -- one set for the whole process
    with _lock:
        texts = [text for value in values for text in (value, *value.splitlines())]
        forms = {form for text in texts for form in (text, text.strip(), repr(text)[1:-1])}
        fresh = {form for form in forms if len(form) >= _SHORTEST and form != HIDDEN}
        _secrets = tuple(sorted({*_secrets, *fresh}, key=len, reverse=True))


def redacted(text: str) -> str:
    for value in _secrets:
        text = text.replace(value, HIDDEN)
    return text


def redacted_bytes(data: bytes) -> bytes:
    for value in _secrets:
        data = data.replace(value.encode(), HIDDEN.encode())
    return data


def get_logger(module: str) -> logging.Logger:
    return logging.getLogger(module)


def cut_middle(text: str, limit: int, cut: str = " [...] ") -> str:
    """Shorten ``text`` to ``limit`` characters by leaving out its middle."""
    half = (limit - len(cut)) // 2
    return text if len(text) <= limit else f"{text[:half]}{cut}{text[-half:]}"


def valid_text(text: str) -> str:
    """Replace each lone surrogate ("\\ud83d") by ``?``: UTF-8, the encoding of Ray and gRPC, has none."""
    return text.encode("utf-8", "replace").decode()


JSON_LOG = "DLROVER_RL_LOG"
"""The environment variable that, set to ``json``, turns log lines into JSON objects."""


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"[{process}] {_FORMAT}" if process else _FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
        self._process, self._as_json = process, os.environ.get(JSON_LOG) == "json"

    def format(self, record: logging.LogRecord) -> str:
        if not self._as_json:
            return inert(redacted(super().format(record)))
        line = {"time": self.formatTime(record, self.datefmt), "level": record.levelname, "process": self._process}
        text = record.getMessage() + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")
        return json.dumps({**line, "module": record.name, "message": redacted(text)})


def log_line(process: str, text: str) -> str:
    """Format a line like the log lines of ``process``, for a file that no logger writes."""
    values = {"name": __name__, "levelno": logging.INFO, "levelname": "INFO", "msg": text}
    return f"{_Formatter(process).format(logging.makeLogRecord(values))}\n"


def configure_logging(process: str = "", level: int = logging.INFO) -> None:
    """Write this package's log lines to stderr, after ``[process]``, or as JSON. A second call replaces the first."""
    logger = logging.getLogger(_ROOT)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def short_number(number: float) -> str:
    """Format a number with three digits and a decimal prefix: ``1.24 G``."""
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g} {prefix}"
    return f"{number:g} "
