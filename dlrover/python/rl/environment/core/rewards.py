# SPDX-License-Identifier: Apache-2.0
"""Final answers in text that a model wrote.

The text is hostile: nothing is evaluated, and time is linear in its length."""

import re
from array import array
from collections import deque
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_EXPONENT = r"(?:[eE][-+]?[0-9]+)?"
# A minus between two operands ("5-3") is not a sign.
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}.])[-+])?(?:{_UNSIGNED}){_EXPONENT}")
_NUMBER = re.compile(rf"[-+]?(?:{_UNSIGNED}){_EXPONENT}")


def boxed_answer(text: str) -> str | None:
    """The content of the last ``\boxed{...}`` with a closing brace, nested braces included; None without one."""
    starts, depths = array("q"), array("q")  # Of the boxes still open; compact, for there may be a million of them.
    depth = 0
    last = (-1, -1)
    for match in _BRACES.finditer(text, max(text.find(r"\boxed"), 0)):
        token = match.group()
        if token == "}":
            depth = max(depth - 1, 0)
            if depths and depths[-1] == depth:
                depths.pop()
                last = max(last, (starts.pop(), match.start()))
        elif token == "{":
            depth += 1
        elif token[-1] == "{" and len(token) > 2:
            starts.append(match.end())
            depths.append(depth)
            depth += 1
    return text[slice(*last)] if last[0] >= 0 else None


def marked_answer(text: str) -> str | None:
    r"""The answer that a worked solution marks: its last ``\boxed{}``, or else the line after its last ``####``."""
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    _, marker, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if marker else None


_MARKED_NUMBER = re.compile(rf"[-\s*_`=+\\$\u20ac\u00a3]*(?:{_UNSIGNED})(?![.):]\s+\S)")
_MINUS = re.compile("\u2212|\u2013(?=[$\u20ac\u00a3\\\\]?[\\d.])")


def _given_answer(completion: str) -> str | None:
    """As :func:`marked_answer`, of what a model wrote: ``####`` marks a line that begins with a number, and begins a
    heading elsewhere."""
    boxed = boxed_answer(completion)
    if boxed is not None:
        return boxed
    end = len(completion)
    while (at := completion.rfind("####", 0, end)) >= 0:
        line = completion[at:end].lstrip("#").partition("\n")[0]
        if _MARKED_NUMBER.match(line):
            return line.strip()
        end = at
    return None


def last_number(text: str) -> str | None:
    """The last decimal number in ``text`` as written (``-1,234.5``, ``6e23``), or None."""
    numbers = deque(_NUMBER_IN_TEXT.finditer(text), maxlen=1)
    return numbers[0].group() if numbers else None


def decimal_value(text: str) -> Decimal | None:
    """The exact value of ``text`` when it is one decimal number, thousands separators allowed; else None."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:  # An exponent of more digits than a Decimal holds.
        return None


_CURRENCY_AFTER_SIGN = re.compile(r"(?<![\w)][-+])(?<=[-+])\s?\\?[$\u20ac\u00a3]\s?(?=[\d.])")
_POWER_OF_UNIT = re.compile(
    r"(?<=[ \d])(?:[kcmd]?m|ft|in|yd|mi|inches|feet|miles|units?|met(?:er|re)s?)\^?\{?[23]\}?(?!\w)"
)


_UNIT_IN_TEXT = re.compile(
    r"\\(?:text|textrm|mathrm|mbox) ?\{[^{}\dA-Za-z]{0,4}[A-Za-z](?:[^{}\d]{0,40}[A-Za-z])?(?:\^?\{?[23]\}?)?"
    r"[^{}\d]{0,4}\}(?: ?\^ ?\{?[23]\}?)?"
)
_DIGITS, _MOST_DIGITS, _WORDS = 40, 100, 60
_PART = rf"[-+]?\s?[\d.,]{{1,{_DIGITS}}}"
_FRAC = re.compile(rf"\\[dt]?frac\s?(?:\{{\s?({_PART})\s?\}}|(\d))\s?(?:\{{\s?({_PART})\s?\}}|(\d))")
_FRACTION = re.compile(  # of numbers, behind a whole one or not, and words
    rf"([-+]?)\s?(?:([\d,]{{1,{_DIGITS}}})\s)?({_PART})\s?/\s?({_PART})(?:\s?[A-Za-z%][A-Za-z .%]{{0,{_WORDS}}})?\.?"
)
_SIGN_APART = re.compile(r"([-+])\s+(?=[\d.])")
_UNIT_FRACTION = re.compile(rf"\\[dt]?frac\s?\{{[^{{}}\d]{{0,{_WORDS}}}\}}\s?\{{[^{{}}\d]{{0,{_WORDS}}}\}}")
_CALCULATION = re.compile(r"\\(?:[dt]?frac|sqrt)|\d\}?\s?(?:\\(?:times|cdot)(?![A-Za-z])|\*\*?|\^|/)\s?[{(]?\s?[-+]?\d")


def same_answer(text: str, answer: str) -> bool:
    """True for equal texts, ignoring outer white space, or numbers of the same exact value."""
    if text.strip() == answer.strip():
        return True
    value, expected = decimal_value(text), decimal_value(answer)
    return value is not None and value == expected


def exact_answer(completion: str, answer: str) -> float:
    r"""1.0 when ``completion`` gives ``answer``, else 0.0. An empty ``answer`` is a ValueError.

    The last ``\boxed{}`` counts, or else the whole text, or its last number; of a worked solution as ``answer``, what
    it marks with ``\boxed{}`` or ``####``. ``019``, ``19.0`` and ``19`` are equal; ``1/2`` and ``0.5`` are not.
    """
    answer = marked_answer(answer) or answer
    if not answer.strip():
        raise ValueError("there is no reference answer")
    completion, answer = (_MINUS.sub("-", text) for text in (completion, answer))
    boxed = boxed_answer(completion)
    if boxed is not None:
        return float(same_answer(boxed, answer) or same_answer(_bare(boxed), _bare(answer)))
    number = last_number(completion)
    return float(same_answer(completion, answer) or (number is not None and same_answer(number, answer)))


def _bare(boxed: str) -> str:
    """Without what LaTeX puts around a number."""
    return boxed.replace("{,}", ",").replace("\\,", "").replace("\\!", "").strip().lstrip("\\$ ").rstrip(". ")


def same_final_number(completion: str, answer: str) -> float:
    r"""1.0 when ``completion`` ends with the number of ``answer``, else 0.0: GSM8K's rule.

    What ``\boxed{}`` or ``####`` marks counts, or else the whole text, and of it the last number; currencies, units and
    thousands separators do not matter. A fraction has its value; of other calculations that are marked nothing counts
    but what is behind ``=``. Without such a number in ``answer`` it is a ValueError.
    """
    expected = _final_number(marked_answer(answer), answer)
    if expected is None:
        raise ValueError("the reference answer has no number, or marks a calculation without its result")
    given = _final_number(_given_answer(completion), completion)
    if isinstance(given, Decimal) and isinstance(expected, Decimal):
        return float(given == expected)
    return float(given is not None and _exact(given) == _exact(expected))


def _final_number(marked: str | None, text: str) -> Decimal | Fraction | None:
    """Of what is ``marked``, or of the whole text."""
    plain = _UNIT_FRACTION.sub("", _plain_number_text(marked or text))
    if marked:
        result = plain.rpartition("=")[2].replace("$", "").strip() or plain
        plain = _SIGN_APART.sub(r"\1", result, count=1) if _SIGN_APART.match(result) else result
    if (fraction := _fraction_value(plain)) is not None:
        return fraction
    if marked and _CALCULATION.search(plain):
        return None
    number = last_number(plain)
    return None if number is None else decimal_value(number)


def _exact(number: Decimal | Fraction) -> Fraction | None:
    """None for a number of more digits than any fraction that is read here."""
    if isinstance(number, Decimal) and abs(number.adjusted()) > _MOST_DIGITS:
        return None
    return Fraction(number)


def _fraction_value(text: str) -> Fraction | None:
    """Of a text that is a fraction of two numbers, and nothing else but words."""
    match = _FRACTION.fullmatch(_FRAC.sub(r" \1\2/\3\4 ", text).strip())
    if match is None:
        return None
    whole, above, below = (decimal_value("".join((part or "0").split())) for part in match.groups()[1:])
    if whole is None or above is None or not below:
        return None
    return (-1 if match[1] == "-" else 1) * (Fraction(whole) + Fraction(above) / Fraction(below))


def _plain_number_text(text: str) -> str:
    """Without what LaTeX and units put around a number."""
    plain = _MINUS.sub("-", text.replace("{,}", ",").replace("\\,", "").replace("\\!", ""))
    return _POWER_OF_UNIT.sub("", _UNIT_IN_TEXT.sub("", _CURRENCY_AFTER_SIGN.sub("", plain)))
