# SPDX-License-Identifier: Apache-2.0

r"""Mathematical equivalence: ``\frac{1}{2}`` is ``0.5``. Needs the extra ``math``.

Numbers, numerals with a base (``132_4``) and words are read here, and compared here if both answers are of these kinds.
Math-verify compares others. It reads ``7\,25`` as 32 and a word as a product, and its tolerances are absolute."""

import logging
import os
import re
import signal
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from dlrover.python.rl.common.errors import MissingExtra
from dlrover.python.rl.data.model_text import ignore_thoughts
from dlrover.python.rl.environment.core import rewards
from dlrover.python.rl.environment.core.rewards import boxed_answer, marked_answer, same_answer
from dlrover.python.rl.environment.core.scoring import needs

try:
    import math_verify
    import sympy
except ImportError:
    raise MissingExtra("math-verify", "math") from None

LIMIT_S = 0.7
"""Processor time for comparing two answers, independent of the machine's load; a slower comparison is no equality."""

_STUCK_S = 30.0  # by the clock: a process that waits uses no processor time
_LONGEST, _MOST_DIGITS = 2_000, 100
"""Characters of a box, or of the end of a text, and digits of a number, that are read."""

_PLACES, _RELATIVE = 5e-7, 1e-4
"""Two numbers, one of them with decimals, are equal if they differ by at most ``_PLACES``, math-verify's tolerance, and
by at most ``_RELATIVE`` of the smaller one: 0.333333 is 1/3, 0.3333 is not, and 4e-7 is not 1e-7."""

_SMALL, _ROUNDING = 1e-2, 1e-12
"""Two numbers below ``_SMALL`` that are equal to math-verify must agree to ``_ROUNDING`` of the larger one, or to
``_RELATIVE`` if one has decimals."""


@needs("answer")
@ignore_thoughts
def math_equal(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    r"""Return 1.0 if the completion gives an answer that equals ``answer`` mathematically, else 0.0.

    The last ``\boxed{}`` counts, or else the answer that math-verify reads at the end of the text. Sympy would compute
    ``9^{9^{9}}``, so a forked process compares for at most :data:`LIMIT_S`. Raises ValueError for a reference with
    digits that are not a number (``12\,34``) or not in its base (``192_8``)."""
    if answer is None or not answer.strip():
        raise ValueError("the prompt has no reference answer")
    answer = marked_answer(answer) or answer
    reference = _tidy(answer)
    if rewards.GROUPED.search(reference):
        raise ValueError(f"the reference answer has a number that cannot be read: {answer[:80]!r}")
    boxed = boxed_answer(completion)
    text = boxed if boxed is not None else completion
    if same_answer(text, answer):
        return 1.0
    *unreadable, text = rewards.GROUPED.split(_tidy(text[-_LONGEST:]))
    if boxed is not None and (unreadable or len(boxed) > _LONGEST):
        return 0.0
    value, expected = _read(text), _read(reference, is_reference=True)
    if value is not None and expected is not None:
        return float(_agree(value, expected))
    if boxed is not None or value is not None:
        text = rf"\boxed{{{_latex(text, value)}}}"
    return float(within(LIMIT_S, lambda: _equal(text, _latex(reference, expected))) is True)


_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_END = re.compile(r"(.*[^\s.,;\u3002\uff0c\uff1b])(?<!\\right)\s*[.,;\u3002\uff0c\uff1b]?\s*", re.DOTALL)
_DELIMITED = re.compile(r"\${1,2}([^$]+)\${1,2}|\\[(\[]((?:(?!\\[)\]]).)+)\\[)\]]", re.DOTALL)
_MONEY = rf"(?:\\\$|(?!\$){rewards.CURRENCY}|\\(?:euro|pounds)(?![A-Za-z]))"
_CURRENCY = re.compile(
    rf"(?is)\A([-+]?)\s?(?:{_MONEY}|\$(?!.*\$))\s?(?=[\d.])"
    rf"|(?<=\d)\s?(?:{_MONEY}|(?:US )?dollars?|euros?|pounds?|USD|EUR|GBP)\Z"
)
_BRACKETED = re.compile(r"(?:\\(?:text|mathrm)\s?\{|\()([0-9A-Z.]+)[})](?=_)")
_NUMERAL = re.compile(
    r"(?<![\w\\.}])([0-9A-Z][0-9A-Z\u00a0]{0,60})(?:\.([0-9A-Z]{1,60}))?_(?:(\d\d?)|\{\(?(\d\d?)\)?\})(?!\w)"
)
_POWER_OF_TEN = re.compile(r"(?<=\d)\s?(?:\\times|\\cdot|[\u00d7*])\s?10\s?\^\s?(?:\{([-+]?\d{1,3})\}|(\d)(?!\d))")
_WORD = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox)\s?\{\s*([A-Za-z]+)\s*\}|([A-Z]{2,}|[A-Za-z]{4,})")
_LETTERS = re.compile(r"[A-Z](?:(?:-|\s*(?:[,;\u2192]|\\(?:to|rightarrow)(?![a-z]))\s*|\s+)[A-Z])+")


def _tidy(answer: str) -> str:
    """Write numbers plainly, and remove the punctuation after an answer unless it is prose."""
    text = _BRACKETED.sub(r"\1", rewards.plain_text(answer).strip())
    text = rewards.join_groups(_NUMERAL.sub(_decode_numeral, text))
    end = None if _PROSE.search(text) else _END.fullmatch(text)
    return text if end is None else end[1]


def _decode_numeral(match: re.Match[str]) -> str:
    whole, places, base = match[1].replace("\u00a0", ""), match[2] or "", int(match[3] or match[4])
    if whole.isalpha() and (base <= 10 or len(whole) == 1):  # a symbol
        return match.group()
    try:
        return _latex("", Fraction(int(whole + places, base or 1), base ** len(places)))
    except ValueError:  # not a base, or digits that it does not have
        return f"{whole}_{base}" if whole.isdigit() else match.group()


def _read(answer: str, is_reference: bool = False) -> Decimal | Fraction | str | None:
    """Return the value of a number, or the letters of a word or of a list of capital letters; None for other answers. A
    reference of letters in alphabetical order, with commas, is a set of choices: None."""
    delimited = _DELIMITED.fullmatch(answer)
    answer = _CURRENCY.sub(r"\1", (delimited[1] or delimited[2]).strip() if delimited else answer)
    if _LETTERS.fullmatch(answer):
        letters = re.findall("[A-Z]", answer)
        return None if is_reference and "," in answer and letters == sorted(set(letters)) else "".join(letters).lower()
    if word := _WORD.fullmatch(answer):
        return (word[1] or word[2]).lower()
    number = rewards.number_value(_POWER_OF_TEN.sub(r"e\1\2", answer))
    return None if isinstance(number, Decimal) and abs(number.adjusted()) > _MOST_DIGITS else number


def _agree(value: Decimal | Fraction | str, expected: Decimal | Fraction | str) -> bool:
    if isinstance(value, str) or isinstance(expected, str):
        return value == expected
    number, target = Fraction(value), Fraction(expected)
    if not any(isinstance(side, Decimal) and Fraction(side).denominator > 1 for side in (value, expected)):
        return number == target
    return abs(number - target) <= min(_PLACES, _RELATIVE * float(min(abs(number), abs(target))))


def _latex(text: str, value: Decimal | Fraction | str | None) -> str:
    """Return the number as math-verify reads it, or ``text`` if ``value`` is not a number."""
    if isinstance(value, Fraction):
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)
    return f"{value:f}" if isinstance(value, Decimal) else text


_MATH_MODE = re.compile(r"(?<!\\)\$")  # an escaped one is a currency


def _equal(text: str, answer: str) -> bool:
    is_marked = _MATH_MODE.search(answer) or r"\boxed" in answer
    expected, parsed = _parse(answer if is_marked else rf"\boxed{{{answer}}}"), _parse(text)
    return bool(math_verify.verify(expected, parsed, timeout_seconds=None)) and not _differ(expected[0], parsed[0])


def _differ(expected: Any, parsed: Any) -> bool:
    """Return True for two small numbers that differ relatively, and for tuples with such numbers."""
    if isinstance(expected, sympy.Tuple | sympy.Interval) and isinstance(parsed, sympy.Tuple | sympy.Interval):
        return any(map(_differ, expected.args, parsed.args))
    sides = [side.rhs if isinstance(side, sympy.Eq) else side for side in (expected, parsed)]
    if not all(isinstance(side, sympy.Expr) and side.is_comparable for side in sides):
        return False
    first, second = (side.evalf(30) for side in sides)
    size = max(abs(first), abs(second))
    has_decimals = any(side.has(sympy.Float) for side in sides)
    return bool(size < _SMALL and abs(first - second) > size * (_RELATIVE if has_decimals else _ROUNDING))


def _parse(text: str) -> Any:
    # Its own time limits need SIGALRM, which the verifier's process uses otherwise.
    return math_verify.parse(text.replace("\u00a0", " "), parsing_timeout=None)


def within(limit_s: float, function: Callable[[], bool]) -> bool | None:
    """Call ``function`` in a forked process; None if it raises, hangs, or exceeds ``limit_s`` of processor time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for number in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)  # the kernel's action also ends arithmetic in C
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


logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about time limits that its caller sets, as here
_equal("1", "2")  # the first call builds parsers, which forked processes inherit
