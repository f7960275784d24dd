# SPDX-License-Identifier: Apache-2.0
"""Prompts with reference answers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ConfigError, DataError, EngineError
from dlrover.python.rl.common.names import hint, nearest
from dlrover.python.rl.data.conversation import arguments_of_template, encode_prompt
from dlrover.python.rl.data.jsonl import (
    describe_columns,
    find_message_faults,
    find_template_faults,
    surrogate_faults,
    template_kwargs_of,
)
from dlrover.python.rl.data.source import RowReader, SourceRows

_PROMPTS = ("prompt", "messages")
_KEYS = (*_PROMPTS, "answer", "extra_info")


@dataclass(frozen=True)
class PromptRow:
    """A prompt, its reference answer, user data, and the line in its file, from 1 (0 without a file)."""

    prompt: str | list[dict[str, str]]
    answer: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    line: int = field(default=0, compare=False)


def load_prompts(where: str | Path, keys: Mapping[str, str] | None = None) -> list[PromptRow]:
    """Read rows of ``{"prompt": text}`` or ``{"messages": [...]}`` with ``"answer"`` and ``"extra_info"``, as
    :class:`RowReader`. The answer may also be ``extra_info["answer"]``; an answer that is neither text nor a number
    moves there. Further keys are added to ``extra_info``, whose ``chat_template_kwargs`` gets the ``tools`` of a row
    with messages."""
    return to_prompts(PROMPT_ROWS.read(where, keys))


def to_prompts(rows: SourceRows) -> list[PromptRow]:
    return [PromptRow(**row, line=line) for line, row in rows.numbered]


def find_prompt_faults(
    tokenizer: Any, prompts: Iterable[tuple[str, Any, Any]], limit: int | None, check: Callable[[list[int]], None]
) -> tuple[list[ConfigError], list[ConfigError]]:
    """Return an error for each prompt that the model cannot complete (``check`` raises EngineError), and for each one
    with more than ``limit`` tokens. ``prompts`` are places, prompts and arguments of the chat template."""
    wrong: list[ConfigError] = []
    too_long: list[ConfigError] = []
    for place, prompt, arguments in prompts:
        try:
            tokens = encode_prompt(tokenizer, prompt, arguments)
        except DataError as error:
            wrong += [ConfigError(place, item.what) for item in error.errors]
            continue
        if limit is not None and len(tokens) > limit:
            too_long.append(ConfigError(place, f"{len(tokens)} tokens, {limit} at most"))
            continue
        try:
            check(tokens)
        except EngineError as error:
            wrong.append(ConfigError(place, f"{len(tokens)} tokens leave no space for new ones: {error}"))
    return wrong, too_long


def empty_prompts(count: int) -> list[PromptRow]:
    """Return rows for an environment that makes its prompts from the row number, ``extra_info["seed"]``."""
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    return [PromptRow("", extra_info={"seed": number}) for number in range(count)]


def _normalize(raw: Mapping[str, Any]) -> dict[str, Any]:
    if faults := _faults(raw):
        raise DataError([ConfigError("data", fault) for fault in faults])
    extra, answer = dict(raw.get("extra_info") or {}), raw.get("answer")
    if answer is not None and not _is_answer(answer):
        extra.setdefault("answer", answer)
        answer = None
    if answer is None and _is_answer(extra.get("answer")):
        answer = extra.get("answer")
    prompt = raw["prompt"] if "prompt" in raw else raw["messages"]
    further = {key: value for key, value in raw.items() if key not in _KEYS}
    if "messages" in raw and (arguments := template_kwargs_of(raw)):
        extra["chat_template_kwargs"] = {**arguments_of_template(extra), **arguments}
    return {"prompt": prompt, "answer": None if answer is None else str(answer), "extra_info": {**further, **extra}}


def _faults(raw: Mapping[str, Any]) -> list[str]:
    faults = []
    if "prompt" not in raw and "messages" not in raw:
        columns = describe_columns(raw, "prompt", *(["answer"] if "answer" not in raw else []))
        close = [key for key in raw if "data.keys" not in columns and key not in _KEYS and nearest(key, _PROMPTS)]
        faults = [f"unknown key '{key}'{hint(key, _PROMPTS)}" for key in close]
        faults = faults or [f"has no 'prompt' or 'messages'{columns}"]
    elif "prompt" in raw and "messages" in raw:
        faults.append("give 'prompt' or 'messages', not both")
    if "prompt" in raw and (not isinstance(raw["prompt"], str) or not raw["prompt"]):
        faults.append("'prompt' must be text and not empty, or a list of messages")
    faults += surrogate_faults("prompt", raw.get("prompt"))
    if "messages" in raw:
        faults += [*find_message_faults(raw["messages"]), *find_template_faults(raw)]
    extra = {} if raw.get("extra_info") is None else raw["extra_info"]
    if not isinstance(extra, dict):
        return [*faults, "'extra_info' must be an object"]
    both = [value for value in (raw.get("answer"), extra.get("answer")) if value is not None]
    no_numbers = [f"the answer is {value}" for value in both if isinstance(value, float) and not isfinite(value)]
    differ = ["'answer' and 'extra_info.answer' differ"] if len({*map(str, both)}) > 1 else []
    return faults + (no_numbers or differ)


def _is_answer(value: Any) -> bool:
    """Return True for text or a number, which reward functions get as text."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)


PROMPT_ROWS = RowReader(_normalize, names=_KEYS, uses_others=True)
