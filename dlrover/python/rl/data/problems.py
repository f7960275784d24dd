"""Problems to be solved by the policy: prompts with their answers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.data.jsonl import in_line_order, raise_problems
from dlrover.python.rl.data.messages import message_faults
from dlrover.python.rl.data.source import scan_rows

_KEYS = ("prompt", "messages", "answer", "extra_info")


@dataclass(frozen=True)
class PromptFaults:
    """Why prompts cannot be completed, each with its place.

    Attributes:
        wrong: the model cannot.
        too_long: more tokens than a run is to take.
    """

    wrong: list[Problem]
    too_long: list[Problem]


@dataclass(frozen=True)
class PromptRow:
    """One problem.

    Attributes:
        prompt: raw text, or the messages of a conversation (``{"role": ..., "content": ...}``).
        answer: the reference answer, or None.
        extra_info: the user's own data; reaches the environment unchanged.
        line: where it stands in its file, from 1; 0 when it comes from none.
    """

    prompt: str | list[dict[str, str]]
    answer: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    line: int = field(default=0, compare=False)


def load_prompts(where: str | Path, keys: Mapping[str, str] | None = None) -> list[PromptRow]:
    """Read rows of ``{"prompt": text}`` or ``{"messages": [...]}`` with ``"answer"`` and ``"extra_info"``.

    The answer may also stand in ``extra_info["answer"]``; numbers become text.

    Args:
        where: a file, a folder or a hub name; see :func:`~dlrover.python.rl.data.source.scan_rows`.
        keys: the source's own names of these columns.

    Raises:
        DataError: any row is wrong, or there is none; names every line that is (20 at most).
    """
    rows, problems = _scan(where, keys)
    if problems:
        raise_problems(problems)
    return rows


def check_prompts(where: str | Path, keys: Mapping[str, str] | None = None) -> list[Problem]:
    """Everything :func:`load_prompts` would refuse the source for; empty when it would not."""
    return _scan(where, keys)[1]


def empty_prompts(count: int) -> list[PromptRow]:
    """Rows for an environment that says itself what it begins with, by the ``seed`` of ``extra_info``, which is the
    row's number: so the samples of a prompt begin alike. Empty prompts, no answers.

    Raises:
        ValueError: ``count`` is not positive.
    """
    if count < 1:
        raise ValueError(f"need a row at least, not {count}")
    return [PromptRow("", extra_info={"seed": number}) for number in range(count)]


def _scan(where: str | Path, keys: Mapping[str, str] | None) -> tuple[list[PromptRow], list[Problem]]:
    found, problems = scan_rows(where, keys, _KEYS)
    rows: list[PromptRow] = []
    for line, raw in found.numbered:
        faults = _faults(raw)
        problems += [Problem(f"{where}:{line}", fault) for fault in faults]
        if not faults:
            rows.append(_row(raw, line))
    return rows, in_line_order(problems)


def _faults(raw: dict[str, Any]) -> list[str]:
    faults = [f"unknown key '{key}'{hint(key, _KEYS)}" for key in raw if key not in _KEYS]
    if ("prompt" in raw) == ("messages" in raw):
        faults.append(f"give 'prompt' or 'messages', not {'both' if 'prompt' in raw else 'neither'}")
    if "prompt" in raw and (not isinstance(raw["prompt"], str) or not raw["prompt"]):
        faults.append("'prompt' must be text and not empty, or a list of messages")
    if "messages" in raw:
        faults += message_faults(raw["messages"])
    return faults + _answer_faults(raw)


def _answer_faults(raw: dict[str, Any]) -> list[str]:
    extra = raw.get("extra_info", {})
    if not isinstance(extra, dict):
        return ["'extra_info' must be an object"]
    places = {"answer": raw.get("answer"), "extra_info.answer": extra.get("answer")}
    faults = [f"'{place}' must be text or a number" for place, value in places.items() if not _is_answer(value)]
    given = {str(value) for value in places.values() if value is not None}
    if not faults and len(given) > 1:
        faults.append("'answer' and 'extra_info.answer' differ")
    return faults


def _is_answer(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, str | int) and not isinstance(value, bool))


def _row(raw: dict[str, Any], line: int) -> PromptRow:
    extra = raw.get("extra_info", {})
    answer = raw["answer"] if raw.get("answer") is not None else extra.get("answer")
    prompt = raw["prompt"] if "prompt" in raw else raw["messages"]
    return PromptRow(prompt, None if answer is None else str(answer), extra, line)
