# SPDX-License-Identifier: Apache-2.0
r"""Final answers in a model's text, and the reader of numbers for all verifiers.

A number is read whole or not at all. Its digits may be in groups of three, or in Indian groups (``8,00,000``), by
``,``, ``'``, ``_``, a space, a typographic space, or the LaTeX of these (``{,}``, ``\,``, ``\;``, ``\:``, ``\ ``,
``~``). Digits that are joined in another way are not a number, nor are the last of them: ``12,34``, ``0,500``,
``1,000 500``, ``1.2.3``, ``6:30``, ``10^3``, ``132_4``, ``3\u00bd``.

A plain space, a comma with a space, and a hyphen are ambiguous. A space joins two or three digits to a run that begins
with at most three (``7 250``, and ``12 34``, which is not a number), and a fraction to its whole number (``3 1/2``);
otherwise it separates numbers (``in 2024 100 people``), as the other two always do (``12, 500``; ``5-3``).

The text is hostile: nothing is evaluated, and time is linear in its length."""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)

CURRENCY = r"[$\u20ac\u00a3\u00a5\u20b9]"

_TYPOGRAPHIC = r"~\u00b4\u02bc\u2000-\u200b\u2010\u2011\u2018\u2019\u202f\u205f\u2212\u3000"
_SPELLING = re.compile(
    rf"\{{\\?,\}}|[\\{_TYPOGRAPHIC}\u00a0\u2013](?<!\\\\)(?:(?<=[{_TYPOGRAPHIC}])|(?<=\u00a0)(?:(?<!\d\u00a0)|(?!\d))"
    rf"|(?<=\u2013)(?=\\?{CURRENCY}?[\d.])"
    r"|(?<=\\)(?:! ?|[,;: ]|(?:thin|med|thick|en|nobreak)?space(?![A-Za-z])|[a-z]{4,9}\{,\}))"
)
_PLAIN = dict(
    zip("\u00b4\u02bc\u2018\u2019\u2010\u2011\u2013\u2212", "''''----", strict=True), **{r"\!": "", "{,}": ","}
)

# Digits of other scripts, and signs such as U+00BD, may be part of a number; only 0 to 9 are read.
_DIGITS = r"[\d\u00bc-\u00be\u2150-\u215e]+"
_JOIN = r"[.,'_:`\u00a0\u00b7\u00d7\u00f7\u066b\u066c\uff0c\uff0e\uff1a]|\*\*?| ?/ ?[-+]?|\^\{?[-+]?|[eE][-+]?"
_JOINED = rf"(?:{_JOIN}){_DIGITS}|[\u00b2\u00b3\u00b9\u2070-\u2079]"
_SPACED = r" (?:\d\d\d?(?!\d)|\d+ ?/ ?\d+)"
# A minus between two operands ("5-3") is not a sign.
_RUN = rf"(?:(?<![\w)\]}}.])[-+])?(?>\.?(?:(?!\d{{4}}){_DIGITS}(?:{_JOINED}|{_SPACED})*|{_DIGITS}(?:{_JOINED})*))"
_BY_THREE = r"[1-9][0-9]{0,2}(?P<mark>[,'_\u00a0 ])[0-9]{3}(?:(?P=mark)[0-9]{3})*"
_INDIAN = r"[1-9][0-9]?(?P<comma>[,'_\u00a0 ])[0-9]{2}(?:(?P=comma)[0-9]{2})*(?P=comma)[0-9]{3}"
_DECIMAL = re.compile(rf"[-+]?(?:(?:{_BY_THREE}|{_INDIAN}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SEPARATORS = dict.fromkeys(map(ord, ",'_\u00a0 "))
_PART = r"[-+]?[\d.,'_\u00a0 ]{1,40}"
_FRACTION = re.compile(rf"([-+]?)\s?(?:([\d,'_\u00a0]{{1,40}}) )?({_PART})/\s?({_PART})")
_FRAC = re.compile(rf"\\[dt]?frac\s?(?:\{{\s?({_PART})\s?\}}|(\d))\s?(?:\{{\s?({_PART})\s?\}}|(\d))")
_BEFORE_FRAC = re.compile(r"(?<=\d) {0,3}(?=\\[dt]?frac)")
# A comma or a plain space may also separate the elements of a set or a pair: only Indian groups are surely a number.
GROUPED = re.compile(
    r"(?<![\w^\\.'])(?:\d+(?:[\u00a0'_]\d+)+|(?<!,)\d\d?(?:,\d\d)+,\d{3}(?!,\d))(?:\.\d+)?(?![\u00a0'_.]?\d|_\{)"
)
_CALCULATION = re.compile(r"\\(?:[dt]?frac|sqrt)|\^\s?\{?\s?[-+]?\d")
_NO_WORDS = re.compile(r"(?:[^\w\\]|_|\\(?:times|cdot|div|pm|ast|q?quad)(?![A-Za-z])|\\[^A-Za-z])*")


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` with a closing brace, with nested braces; None without one."""
    last = (-1, -1)
    starts: list[int] = []  # where the contents of open boxes start; -1 for other open braces
    for match in _BRACES.finditer(text, max(text.find(r"\boxed"), 0)):
        token = match.group()
        if token == "}":
            start = starts.pop() if starts else -1
            last = max(last, (start, match.start())) if start >= 0 else last
        elif token == "{":
            starts.append(-1)
        elif token.endswith("{") and len(token) > 2:
            starts.append(match.end())
    return text[slice(*last)] if last[0] >= 0 else None


def marked_answer(text: str) -> str | None:
    r"""Return the answer that a worked solution marks: its last ``\boxed{}``, or the line after its last ``####``."""
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    _, marker, line = text.rpartition("####")
    return line.strip().partition("\n")[0] if marker else None


def plain_text(text: str) -> str:
    """Replace the LaTeX and the typography of spaces, separators and minus signs; U+00A0 remains between digits."""

    def respell(match: re.Match[str]) -> str:
        mark, start, end = match.group()[-3:].strip(), match.start(), match.end()
        is_joint = text[max(start - 1, 0) : start].isdecimal() and text[end : end + 1].isdecimal()
        return _PLAIN.get(mark, "\u00a0" if is_joint else " ")

    return _SPELLING.sub(respell, text)


def last_number(text: str, is_single: bool = False) -> str | None:
    """Return the last number in ``text``, in plain spelling (``-1,234.5``, ``6e23``, ``1/2``). Return None if the last
    digits are not a number, and with ``is_single`` if no word separates it from another number."""
    text, last = _plain_fractions(plain_text(text)), None
    if is_single and _CALCULATION.search(text):
        return None
    first = re.search(r"\d", text)
    for run in re.finditer(_RUN, text[max(first.start() - 3, 0) :] if first else ""):
        if is_single and last is not None and _NO_WORDS.fullmatch(run.string, last.end(), run.start()):
            return None
        last = run
    return last.group() if last is not None and number_value(last.group()) is not None else None


def decimal_value(text: str) -> Decimal | None:
    """Return the exact value of ``text`` if it is one decimal number, else None."""
    text = plain_text(text).strip()
    if not _DECIMAL.fullmatch(text):
        return None
    try:
        return Decimal(text.translate(_SEPARATORS))
    except InvalidOperation:  # the exponent has too many digits for a Decimal
        return None


def number_value(text: str) -> Decimal | Fraction | None:
    """Return the exact value of a decimal number, a fraction of two, or a whole number and a fraction; else None."""
    match = _FRACTION.fullmatch(_plain_fractions(plain_text(text)).strip())
    if match is None:
        return decimal_value(text)
    whole, above, below = (decimal_value(part or "0") for part in match.groups()[1:])
    if whole is None or above is None or not below or (match[2] and not 0 < above < below):
        return None
    return (-1 if match[1] == "-" else 1) * (Fraction(whole) + Fraction(above) / Fraction(below))


def join_groups(text: str) -> str:
    """Remove the separators of numbers in a plain expression; matches of :data:`GROUPED` that remain are unreadable."""
    return GROUPED.sub(lambda run: run[0] if decimal_value(run[0]) is None else run[0].translate(_SEPARATORS), text)


def _plain_fractions(text: str) -> str:
    return _FRAC.sub(r"\1\2/\3\4 ", _BEFORE_FRAC.sub(" ", text))


_MARKED_NUMBER = re.compile(rf"(?:[-\s*_`=+\\]|{CURRENCY})*{_RUN}(?![.):]\s+\S)")


def _stated_answer(completion: str) -> str | None:
    """Return the marked answer: ``####`` marks a line that begins with a number; otherwise it begins a heading."""
    boxed = boxed_answer(completion)
    if boxed is not None:
        return boxed
    for part in reversed(completion.split("####")[1:]):
        line = part.lstrip("#").partition("\n")[0]
        if _MARKED_NUMBER.match(line):
            return line.strip()
    return None


_CURRENCY_AFTER_SIGN = re.compile(rf"(?<![\w)][-+])(?<=[-+])\s?\\?{CURRENCY}\s?(?=[\d.])")
_POWER_OF_UNIT = re.compile(
    r"(?<=[ \d])(?:[kcmd]?m|ft|in|yd|mi|inches|feet|miles|units?|met(?:er|re)s?)\^?\{?[23]\}?(?!\w)"
)
_UNIT_IN_TEXT = re.compile(
    r"\\(?:text|textrm|mathrm|mbox) ?\{[^{}\dA-Za-z]{0,4}[A-Za-z](?:[^{}\d]{0,40}[A-Za-z])?(?:\^?\{?[23]\}?)?"
    r"[^{}\d]{0,4}\}(?: ?\^ ?\{?[23]\}?)?"
)
_SIGN_APART = re.compile(r"([-+])\s+(?=[\d.])")
_UNIT_FRACTION = re.compile(r"\\[dt]?frac\s?\{[^{}\d]{0,60}\}\s?\{[^{}\d]{0,60}\}")
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2}|\n")


def same_answer(text: str, answer: str) -> bool:
    """Return True for equal texts, ignoring outer white space, and for numbers with the same exact value."""
    if text.strip() == answer.strip():
        return True
    value, expected = decimal_value(text), decimal_value(answer)
    return value is not None and value == expected


def exact_answer(completion: str, answer: str) -> float:
    r"""Return 1.0 if ``completion`` gives ``answer``, else 0.0. Raises ValueError for an empty ``answer``.

    The last ``\boxed{}`` counts, or else the whole text, or its last number, as for :func:`same_final_number`; in a
    worked solution as ``answer``, the text that ``\boxed{}`` or ``####`` marks. ``019``, ``19.0`` and ``19`` are equal;
    ``1/2`` and ``0.5`` are not."""
    answer = marked_answer(answer) or answer
    if not answer.strip():
        raise ValueError("the prompt has no reference answer")
    completion, answer = plain_text(completion), plain_text(answer)
    boxed = boxed_answer(completion)
    if boxed is not None:
        return float(same_answer(boxed, answer) or same_answer(_bare(boxed), _bare(answer)))
    number = _final_number(completion, is_marked=False)
    return float(same_answer(completion, answer) or (number is not None and same_answer(number, answer)))


def _bare(boxed: str) -> str:
    """Remove currency signs before a boxed answer, punctuation after it, and spaces in it except between digits."""
    return re.sub(rf"^(?:\\?{CURRENCY}| )+|(?<![\d.,;']) | (?![\d.,;'])", "", boxed).rstrip(".,;")


def same_final_number(completion: str, answer: str) -> float:
    r"""Return 1.0 if ``completion`` ends with the number of ``answer``, else 0.0: GSM8K's rule.

    The last number counts, in the text that ``\boxed{}`` or ``####`` marks if there is one; currencies, units and
    thousands separators do not matter. A marked text, and a line without words, must be a single number or fraction: in
    calculations, ranges, times and lists only the part after ``=`` counts. Raises ValueError if ``answer`` has no such
    number."""
    if not answer.strip():
        raise ValueError("the prompt has no reference answer")
    marked, stated = marked_answer(answer), _stated_answer(completion)
    expected = _final_number(_plain_number_text(marked or answer), is_marked=bool(marked))
    if expected is None:
        raise ValueError("the reference answer has no number, or marks a calculation without its result")
    number = _final_number(_plain_number_text(stated or completion), is_marked=bool(stated))
    return float(number is not None and number_value(number) == number_value(expected))


def _final_number(text: str, is_marked: bool) -> str | None:
    """Return the last number of ``text``; in a marked text, or a line without words, the only one after ``=``."""
    if not is_marked and _WORD.search(text):
        return last_number(text)
    result = text.rpartition("=")[2].replace("$", "").strip() or text
    return last_number(_SIGN_APART.sub(r"\1", result, count=1) if _SIGN_APART.match(result) else result, is_single=True)


def _plain_number_text(text: str) -> str:
    """Remove LaTeX and units around a number."""
    plain = _UNIT_IN_TEXT.sub("", _CURRENCY_AFTER_SIGN.sub("", plain_text(text)))
    return _UNIT_FRACTION.sub("", _POWER_OF_UNIT.sub("", plain)).strip()
