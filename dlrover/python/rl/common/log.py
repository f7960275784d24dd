# SPDX-License-Identifier: Apache-2.0
"""Loggers of this package: one line format, quiet libraries."""

import logging
import sys

from dlrover.python.rl.common.redaction import redacted
from dlrover.python.rl.common.terminal import inert

_ROOT = "dlrover"
_FORMAT = "%(asctime)s %(levelname).1s %(message)s"


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
