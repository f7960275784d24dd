"""Loggers of this package: one line format, quiet libraries."""

import logging
import sys

_ROOT = "dlrover"
_FORMAT = "%(asctime)s %(levelname).1s %(message)s"


def get_logger(module: str) -> logging.Logger:
    """The logger of a module of this package."""
    return logging.getLogger(module)


def configure_logging(who: str = "", level: int = logging.INFO) -> None:
    """Send this package's log lines to stderr. ``who`` (``ROLLOUT-1``) stands in front of each. Safe to repeat."""
    logger = logging.getLogger(_ROOT)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[{who}] {_FORMAT}" if who else _FORMAT, datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
