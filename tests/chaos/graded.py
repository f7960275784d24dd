# SPDX-License-Identifier: Apache-2.0
"""Rewards of the tiny job: exact arithmetic that has something to teach to a model of random weights, and the same with
one problem on which it is hostile, the same way every time, which a chaos run has to live with."""

import os
import zlib

MARKED = "2"
"""The answer of the problem that is poisoned."""


def graded(completion, answer, extra_info):
    """1 for the answer, else an eighth for each digit and a sixteenth for each other printable character, to 3/4.

    All values are sums of powers of two, so that no rounding depends on the order of anything.
    """
    if completion == answer:
        return 1.0
    digits = sum(character in "0123456789" for character in completion)
    printable = sum(" " <= character <= "~" for character in completion)
    return min(0.125 * digits + 0.0625 * (printable - digits), 0.75)


def judge(completion: str, answer: str | None, extra_info: dict) -> float:
    """The tiny job's own reward. On the marked problem the text decides what goes wrong."""
    fault = zlib.crc32(completion.encode()) % 16 if str(answer) == MARKED else None
    while fault == 0:  # an endless loop: only a deadline ends it
        pass
    if fault == 1:
        os._exit(3)
    if fault == 2:
        raise ValueError("a poisoned sample")
    return graded(completion, answer, extra_info)
