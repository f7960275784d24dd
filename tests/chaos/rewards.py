# SPDX-License-Identifier: Apache-2.0
"""A reward function that a chaos run has to live with: on one problem it is hostile, the same way every time."""

import os
import zlib

from tests.chaos.graded import graded

MARKED = "2"
"""The answer of the problem that is poisoned."""


def judge(completion: str, answer: str | None, extra_info: dict) -> float:
    """The tiny job's own reward. On the marked problem the text decides what goes wrong."""
    if str(answer) == MARKED:
        _misbehave(zlib.crc32(completion.encode()) % 16)
    return graded(completion, answer, extra_info)


def _misbehave(how: int) -> None:
    if how == 0:
        while True:  # an endless loop: only a deadline ends it
            pass
    if how == 1:
        os._exit(3)
    if how == 2:
        raise ValueError("a poisoned sample")
