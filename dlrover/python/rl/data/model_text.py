# SPDX-License-Identifier: Apache-2.0
"""Thoughts, tool calls and the answer in a model's text, which is hostile; time is linear in its length."""

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

_NAMES = ("think", "seed:think", "mm:think", "thinking", "thought", "reasoning")
_MARKERS = ("[THINK]", "[/THINK]", "\u25c1think\u25b7", "\u25c1/think\u25b7", "<|channel>", "<channel|>")
THOUGHT_TAGS = {f"<{name}>": f"</{name}>" for name in _NAMES} | dict(zip(_MARKERS[::2], _MARKERS[1::2], strict=True))
"""Closing tags by opening tags; the last ones are of Magistral, Kimi-VL and Gemma 4."""

_OPENING, _CLOSING = ("|".join(map(re.escape, tags)) for tags in (THOUGHT_TAGS, THOUGHT_TAGS.values()))
_OPENED = re.compile(rf"^[ \t]*(?:{_OPENING})", re.MULTILINE)
_MARK = re.compile(rf"(?<!`)([`'\"])(?:{_CLOSING})\1(?![\w`])|(?P<end>{_CLOSING})|(?P<call><tool_call>)\s*(?=\{{)")
_IS_CLOSED = r"(?=[^<]*+(?:<(?!/?tool_call>)[^<]*+)*+</tool_call>)"
_CALL = re.compile(rf"(?:<tool_call>(?=\s*\{{)|^[ \t]*<tool_call>|(?<!`)<tool_call>{_IS_CLOSED})\s*", re.MULTILINE)
_CALL_END = "</tool_call>"
_TOKEN = re.compile(r'[\s,:]*+(?:(?P<open>[{[])|(?P<close>[]}])|"(?:[^"\\]++|\\.)*+"|[-+.\w]++)', re.DOTALL)


def split_thoughts(text: str, think_prefix: str = "") -> tuple[str, str | None]:
    """Separate the thoughts from the answer in ``think_prefix + text``; the answer is None if the thoughts do not end.

    The answer follows the last closing tag; a text without tags is all answer. An opening tag counts at the beginning
    of a line and directly after a closing tag; a closing tag anywhere, except alone between quotation marks or
    backticks, as in ``split("</think>")``, and in the JSON of a tool call. Other tags are words."""
    text, at, end = think_prefix + text, 0, 0
    while mark := _MARK.search(text, at):
        at = _end_of_json(text, mark.end()) if mark["call"] else mark.end()
        end = at if mark["end"] else end
    return (text, None) if _OPENED.search(text[end:]) else (text[:end], text[end:])


def split_calls(answer: str) -> tuple[str, list[str]]:
    """Separate the text around tool calls from the texts between ``<tool_call>`` and ``</tool_call>``.

    The closing tag is searched after the call's JSON; the last call may lack it. Within a line ``<tool_call>`` is a
    word unless an object follows or the closing tag is the next tag."""
    around, calls, at = list[str](), list[str](), 0
    while opening := _CALL.search(answer, at):
        start = opening.end()
        end = answer.find(_CALL_END, _end_of_json(answer, start))
        calls.append(answer[start:end] if end >= 0 else answer[start:])
        around.append(answer[at : opening.start()])
        at = end + len(_CALL_END) if end >= 0 else len(answer)
    return "".join([*around, answer[at:]]), calls


def _end_of_json(text: str, start: int) -> int:
    """Return the position after the JSON value at ``start``; ``start`` if it has no end."""
    at, depth = start, 0  # json's decoder would count the lines of all text before each error
    while token := _TOKEN.match(text, at):
        at, depth = token.end(), depth + bool(token["open"]) - bool(token["close"])
        if depth <= 0:
            return at
    return start


def ignore_thoughts(function: Callable[..., Any]) -> Any:
    """Decorate a reward function so that it gets the answer only, and unfinished thoughts score 0. Its attribute
    ``score_whole`` is the function itself, for ``reward.thoughts: scored``."""

    @wraps(function)
    def score_answer(completion: str, *arguments: Any, **columns: Any) -> Any:
        answer = split_thoughts(completion)[1]
        return 0.0 if answer is None else function(answer, *arguments, **columns)

    score_answer.score_whole = function  # type: ignore[attr-defined]
    return score_answer
