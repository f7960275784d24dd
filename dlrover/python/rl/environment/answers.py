"""Finding and comparing final answers in text that a model wrote.

The text is hostile until shown otherwise: nothing is evaluated, and time is linear in its length.
"""

import re
from array import array
from collections import deque
from decimal import Decimal, InvalidOperation

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_EXPONENT = r"(?:[eE][-+]?[0-9]+)?"
# A minus between two operands ("5-3") is not a sign.
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}.])[-+])?(?:{_UNSIGNED}){_EXPONENT}")
_NUMBER = re.compile(rf"[-+]?(?:{_UNSIGNED}){_EXPONENT}")


def boxed_answer(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` with a closing brace holds, nested braces included; None when there is none."""
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


def last_number(text: str) -> str | None:
    """The last decimal number in ``text`` as written (``-1,234.5``, ``6e23``), or None."""
    found = deque(_NUMBER_IN_TEXT.finditer(text), maxlen=1)
    return found[0].group() if found else None


def decimal_value(text: str) -> Decimal | None:
    """The exact value of ``text`` when it is one decimal number, thousands separators allowed; else None."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:  # An exponent of more digits than a Decimal holds.
        return None


def same_answer(said: str, answer: str) -> bool:
    """True when both are the same text, white space around it aside, or numbers of the same exact value."""
    if said.strip() == answer.strip():
        return True
    value, expected = decimal_value(said), decimal_value(answer)
    return value is not None and value == expected


def exact_answer(completion: str, answer: str) -> float:
    r"""1.0 when ``completion`` gives ``answer``, else 0.0.

    What counts is the last ``\boxed{}`` when there is one; else the whole text, or the last number in it.
    ``019``, ``19.0`` and ``19`` are the same answer; ``1/2`` and ``0.5`` are not.

    Raises:
        ValueError: ``answer`` is empty: an empty completion would be right.
    """
    if not answer.strip():
        raise ValueError("there is no answer to compare with")
    boxed = boxed_answer(completion)
    if boxed is not None:
        return float(same_answer(boxed, answer))
    number = last_number(completion)
    return float(same_answer(completion, answer) or (number is not None and same_answer(number, answer)))
