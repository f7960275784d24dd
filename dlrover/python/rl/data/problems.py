"""Problems to be solved by the policy: prompts with their answers, and rows held out for evaluation."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.data.jsonl import in_line_order, raise_problems, scan_jsonl
from dlrover.python.rl.data.messages import message_faults

_KEYS = ("prompt", "messages", "answer", "extra_info")


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


def load_prompts(path: str | Path) -> list[PromptRow]:
    """Read JSON Lines of ``{"prompt": text}`` or ``{"messages": [...]}`` with ``"answer"`` and ``"extra_info"``.

    The answer may also stand in ``extra_info["answer"]``; numbers become text.

    Raises:
        DataError: any row is wrong, or there is none; names every line that is (20 at most).
    """
    rows, problems = _scan(path)
    if problems:
        raise_problems(problems)
    return rows


def check_prompts(path: str | Path) -> list[Problem]:
    """Everything :func:`load_prompts` would refuse the file for; empty when it would not."""
    return _scan(path)[1]


def hold_out(rows: Sequence[PromptRow], size: int | float, seed: int) -> tuple[list[int], list[int]]:
    """Choose rows to evaluate on, by a hash of seed and prompt: equal prompts always land on the same side.

    Args:
        rows: the problems.
        size: rows to hold out: a count (``int``) or a fraction of the rows (``float``, below 1, rounded, at least one
            row). More are held out only where the last prompt chosen has copies.
        seed: another seed is another choice.

    Returns:
        Indices of the rows to train on and of those held out, both rising.

    Raises:
        ValueError: ``size`` is no fraction or count that leaves a row on each side.
        DataError: the copies of the chosen prompts are all the rows.
    """
    if isinstance(size, float):
        if not 0 < size < 1:
            raise ValueError(f"a held-out fraction lies between 0 and 1, not {size:g}")
        size = max(1, round(size * len(rows)))
    if not 0 < size < len(rows):
        raise ValueError(f"{size} of {len(rows)} rows cannot be held out: both sides need a row")
    copies: dict[bytes, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        copies[_digest(row.prompt, seed)].append(index)
    held: list[int] = []
    for digest in sorted(copies):
        if len(held) >= size:
            break
        held += copies[digest]
    if len(held) == len(rows):
        raise DataError("the rows repeat too few prompts to hold any out: nothing would be left to train on")
    chosen = set(held)
    return [index for index in range(len(rows)) if index not in chosen], sorted(held)


def _digest(prompt: str | list[dict[str, str]], seed: int) -> bytes:
    return blake2b(json.dumps([seed, prompt], sort_keys=True).encode(), digest_size=16).digest()


def _scan(path: str | Path) -> tuple[list[PromptRow], list[Problem]]:
    numbered, problems = scan_jsonl(path)
    if not numbered and not problems:
        problems = [Problem(str(path), "holds no rows")]
    rows: list[PromptRow] = []
    for line, raw in numbered:
        faults = _faults(raw)
        problems += [Problem(f"{path}:{line}", fault) for fault in faults]
        if not faults:
            rows.append(_row(raw, line))
    return rows, in_line_order(problems)


def _faults(raw: dict[str, Any]) -> list[str]:
    faults = [f"unknown key '{key}'{hint(key, _KEYS)}" for key in raw if key not in _KEYS]
    if ("prompt" in raw) == ("messages" in raw):
        faults.append(f"give 'prompt' or 'messages', not {'both' if 'prompt' in raw else 'neither'}")
    if "prompt" in raw and (not isinstance(raw["prompt"], str) or not raw["prompt"]):
        faults.append("'prompt' must be text and not empty; a conversation goes under 'messages'")
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
