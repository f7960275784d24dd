# SPDX-License-Identifier: Apache-2.0

r"""Mathematical equivalence by math-verify: ``\frac{1}{2}`` is ``0.5``. Needs the extra ``math``."""

import logging
import os
import re
import signal
from collections.abc import Callable
from typing import Any

from dlrover.python.rl.common.errors import MissingExtra
from dlrover.python.rl.data.model_text import ignore_thoughts
from dlrover.python.rl.environment.core.rewards import boxed_answer, marked_answer, same_answer

try:
    import math_verify
except ImportError:
    raise MissingExtra("math-verify", "math") from None

LIMIT_S = 0.7
"""What comparing two answers may take of a processor. A comparison that is not done by then has shown no equality,
however busy the machine is."""

_STUCK_S = 30.0
"""By the clock: a process that waits for what will never come uses no processor."""

_LONGEST = 2_000
"""Characters of a text that are looked at, from its end."""


@ignore_thoughts
def math_equal(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    r"""1.0 when the completion gives an answer that equals ``answer`` mathematically, else 0.0.

    The last ``\boxed{}`` counts, or else the answer that math-verify reads in the end of the text. Sympy would compute
    ``9^{9^{9}}``, so a forked process compares for at most :data:`LIMIT_S`.
    """
    if answer is None or not answer.strip():
        raise ValueError("the prompt has no reference answer")
    answer = marked_answer(answer) or answer
    boxed = boxed_answer(completion)
    if same_answer(boxed if boxed is not None else completion, answer):
        return 1.0
    text = rf"\boxed{{{boxed[-_LONGEST:]}}}" if boxed is not None else completion[-_LONGEST:]
    return float(within(LIMIT_S, lambda: _equal(text, answer)) is True)


_MATH_MODE = re.compile(r"(?<!\\)\$")  # an escaped one is a currency


def _equal(text: str, answer: str) -> bool:
    is_marked = _MATH_MODE.search(answer) or r"\boxed" in answer
    expected = answer if is_marked else rf"\boxed{{{answer}}}"
    return bool(math_verify.verify(_parse(expected), _parse(text), timeout_seconds=None))


def _parse(text: str) -> Any:
    # Its own time limits are SIGALRM's, which the process of a verifier has another use for.
    return math_verify.parse(text, parsing_timeout=None)


def within(limit_s: float, function: Callable[[], bool]) -> bool | None:
    """Call ``function`` in a forked process; None if it raises, exceeds ``limit_s`` of processor time, or is stuck."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for number in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)  # The kernel's: it ends arithmetic in C too.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            signal.setitimer(signal.ITIMER_REAL, _STUCK_S)
            os.write(writer, b"1" if function() else b"0")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as verdict:
        byte = verdict.read(1)
    os.waitpid(child, 0)
    return {b"1": True, b"0": False}.get(byte)


logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns of limits that are left to its caller, as here.
_equal("1", "2")  # The first one builds parsers; forked processes inherit them.
