# SPDX-License-Identifier: Apache-2.0
"""Conversations in data files, and their faults; JSON and JSON Lines files, with an error for each malformed line. JSON
may have lone halves of surrogate pairs ("\\ud83d"), which no tokenizer accepts."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.common.names import hint, nearest_path, variable_hint

ROLES = ("system", "user", "assistant", "tool")

_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
_TEXTS = _KEYS[1:]
_CALL_FORM = 'must be {"function": {"name": ..., "arguments": {...}}}'
_LONE = re.compile("[\ud800-\udfff]")
_CONVERSATIONS = ("prompt", "messages", "chosen", "rejected")

TEMPLATE_KEYS = ("tools", "chat_template_kwargs")  # the keys of a row that are for the chat template


def normalize_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove nulls (in tables, absent columns) from a row, and move messages from ``prompt`` to ``messages``."""
    plain = {key: value for key, value in row.items() if value is not None}
    if isinstance(plain.get("prompt"), list) and "messages" not in plain:
        plain["messages"] = plain.pop("prompt")
    for key in _CONVERSATIONS:
        if isinstance(plain.get(key), list):
            plain[key] = [normalize_message(message) for message in plain[key]]
    return plain


def normalize_message(message: Any) -> Any:
    """Remove nulls from a message, and add an empty text to ``tool_calls`` without one."""
    if not isinstance(message, dict):
        return message
    plain = {key: value for key, value in message.items() if value is not None}
    return {"content": "", **plain} if "tool_calls" in plain else plain


def drop_nulls_of_calls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the nulls from tool calls in a row of a table, whose columns have the arguments of all calls."""

    def drop(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: drop(item) for key, item in value.items() if item is not None}
        return [drop(item) for item in value] if isinstance(value, list) else value

    def drop_in(message: Any) -> Any:
        has_calls = isinstance(message, dict) and "tool_calls" in message
        return {**message, "tool_calls": drop(message["tool_calls"])} if has_calls else message

    changed = {key: drop(row[key]) for key in TEMPLATE_KEYS if key in row}
    conversations = [key for key in _CONVERSATIONS if isinstance(row.get(key), list)]
    return {**row, **changed, **{key: [drop_in(message) for message in row[key]] for key in conversations}}


def template_kwargs_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's arguments of the chat template, with its ``tools``; in tables they may be JSON text."""
    tools, kwargs = (decode_json(row.get(key)) for key in TEMPLATE_KEYS)
    return {**(kwargs or {}), **({"tools": tools} if tools else {})}


def find_template_faults(row: Mapping[str, Any]) -> list[str]:
    """List the faults of a row's arguments of the chat template, which need messages."""
    tools, kwargs = (decode_json(row.get(key)) for key in TEMPLATE_KEYS)
    faults = [fault for key in TEMPLATE_KEYS for fault in surrogate_faults(key, row.get(key))]
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        faults.append('\'tools\' must be a list of {"type": "function", "function": {...}}, or its JSON text')
    if kwargs and not isinstance(kwargs, dict):
        faults.append("'chat_template_kwargs' must be an object, or its JSON text")
    elif reserved := {"messages", "tokenize", "add_generation_prompt"} & {*(kwargs or ())}:
        faults.append(f"'chat_template_kwargs' cannot set {', '.join(sorted(reserved))}, which the recipe sets")
    if (tools or kwargs) and not any(isinstance(row.get(key), list) for key in _CONVERSATIONS):
        name = "tools" if tools else "chat_template_kwargs"
        faults.append(f"'{name}' is for the chat template, which texts do not use: give 'messages'")
    return faults


def decode_json(value: Any) -> Any:
    """Return the value of JSON text, as tables have it, and any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError):
        return value


def find_message_faults(messages: Any, name: str = "messages") -> list[str]:
    """List the faults of ``name``, which must be a list of messages, not empty, with ``tool_calls`` as in OpenAI's."""
    if not isinstance(messages, list) or not messages:
        return [f"'{name}' must be a list of messages with at least one"]
    return [f"{name}[{index}]: {fault}" for index, message in enumerate(messages) for fault in _faults_of_one(message)]


def _faults_of_one(message: Any) -> list[str]:
    if not isinstance(message, dict):
        return [f"must be an object with 'role' and 'content', not {type(message).__name__}"]
    faults = [f"unknown key '{key}'{hint(key, _KEYS)}" for key in message if key not in _KEYS]
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        faults.append("'role' must be text")
    elif role not in ROLES:
        faults.append(f"unknown role '{role}'{hint(role, ROLES)}")
    if not isinstance(content, str):
        faults.append("'content' must be text")
    faults += [fault for key in _TEXTS for fault in surrogate_faults(key, message.get(key))]
    calls = message.get("tool_calls", [])
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function: Any = call.get("function") if isinstance(call, dict) else None
        has_name = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not has_name or not isinstance(function.get("arguments"), dict | str):
            faults.append(f"tool_calls[{index}]: {_CALL_FORM}")
    return faults


NumberedRow: TypeAlias = tuple[int, dict[str, Any]]  # a row and its line, from 1
_SHOWN = 20
_ALIKE = 3  # more equal errors of a file's rows are shown as one

_OTHER_NAMES = {
    "prompt": ("question", "instruction", "problem", "query", "input", "text"),
    "messages": ("conversations", "conversation"),
    "response": ("output", "answer", "solution", "target"),
    "answer": ("solution", "ground_truth", "target", "label", "output", "response"),
}
"""Columns of other formats by the keys that can read them, such as Alpaca's ``instruction`` and ``output``."""
_MARK = b"\xef\xbb\xbf"


def scan_jsonl(path: str | Path, may_be_array: bool = False) -> tuple[list[NumberedRow], list[ConfigError]]:
    """Return the good rows of a JSON Lines file with their line numbers, and an error for each bad line. If it
    ``may_be_array`` and begins with ``[``, it is an array of objects, which are numbered from 1."""
    path = Path(path)
    try:
        content = path.read_bytes().removeprefix(_MARK)
    except OSError as error:
        return [], [ConfigError(str(path), describe_unreadable(path, error))]
    items: list[Any] = content.split(b"\n")  # not splitlines(): JSON strings may hold an unescaped U+2028
    is_array = may_be_array and content.lstrip().startswith(b"[")
    rows: list[NumberedRow] = []
    errors: list[ConfigError] = []
    try:
        items = _parse(content) if is_array else items
    except ValueError as error:
        return [], [ConfigError(str(path), str(error))]
    for number, item in enumerate(items, start=1):
        if not is_array and not item.strip():
            continue
        try:
            value = item if is_array else _parse(item)
            if not isinstance(value, dict):
                raise ValueError(f"not an object but {type(value).__name__}")
            rows.append((number, value))
        except ValueError as error:
            errors.append(ConfigError(f"{path}:{number}", str(error)))
    return rows, errors


def raise_errors(errors: Sequence[ConfigError]) -> None:
    """Raise DataError with the first 20 ``errors``, if there are any."""
    if errors:
        raise DataError(first_errors(errors))


def first_errors(errors: Sequence[ConfigError]) -> list[ConfigError]:
    """Return the first 20 ``errors``, and one with the number of the others; equal errors of many rows are one."""
    kinds = [(error.where.rpartition(":")[0], error.what) for error in errors]
    alike, single = Counter(kinds), dict[tuple[str, ...], ConfigError]()
    for error, kind in zip(errors, kinds, strict=True):
        if alike[kind] > _ALIKE:
            message = f"{error.what} (the same in {alike[kind] - 1:,} more rows)"
            single.setdefault(kind, ConfigError(error.where, message))
        else:
            single[error.where, *kind] = error
    shown = list(single.values())[:_SHOWN]
    hidden = len(single) - len(shown)
    if hidden:
        file = shown[0].where.rsplit(":", 1)[0]
        shown.append(ConfigError(file, f"and {hidden} more error{'s' if hidden > 1 else ''}"))
    return shown


def describe_columns(row: Mapping[str, Any], *absent: str) -> str:
    """Name the columns of a row that lacks ``absent`` ones, and the settings or changes that make it readable."""
    for name in _OTHER_NAMES["messages"]:
        turns = row.get(name)
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
            if "role" in turns[0]:
                return f"; it has {', '.join(row)}: write data.keys.messages={name}"
            advice = "'role' and 'content' instead of 'from' (human: user, gpt: assistant) and 'value'"
            return f"; its '{name}' are ShareGPT's, which no key reads: write 'messages' with {advice}"
    names = {key: next((name for name in _OTHER_NAMES.get(key, ()) if name in row), None) for key in absent}
    settings = " ".join(f"data.keys.{key}={name}" for key, name in names.items() if name)
    advice = f": write {settings}" if settings else ""
    reward = row.get("reward_model")
    if "answer" in absent and isinstance(reward, Mapping) and "ground_truth" in reward:
        advice += "; copy verl's reward_model.ground_truth to a column 'answer'"
    if row.get("input") and names.get("prompt") == "instruction":
        advice += ", and join 'input' to 'instruction' in the file: a prompt is one column"
    return f"; it has {', '.join(row) or 'nothing'}{advice}"


def sort_by_line(errors: Sequence[ConfigError]) -> list[ConfigError]:
    """Sort by the line number at the end of ``where``; errors of the whole file come first."""
    numbers = {error.where: error.where.rpartition(":")[2] for error in errors}
    return sorted(errors, key=lambda error: int(numbers[error.where]) if numbers[error.where].isdecimal() else 0)


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}{line}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name} is not a number")


def describe_unreadable(path: Path, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read: {error.strerror}"
    if not path.parent.is_dir():
        return f"no such file; there is no folder {path.parent}{variable_hint(str(path))}"
    names = sorted(file.name for file in path.parent.iterdir())
    same = (name for name in names if path.suffix and name.partition(".")[0] == path.name.partition(".")[0])
    close = nearest_path(path.name, names) or next(same, None)
    return f"no such file; did you mean '{close}'?" if close else "no such file"


def surrogate_faults(name: str, value: Any) -> list[str]:
    """Return a fault for each text with a lone surrogate in ``value``, plain data; characters are counted from 1."""
    where = f"'{name}' has" if isinstance(value, str) else f"a text in '{name}' has"
    matches = (_LONE.search(text) for text in _texts(value))
    return [f"{where} a lone surrogate at character {match.start() + 1}" for match in matches if match]


def replace_surrogates(value: Any) -> Any:
    """Replace each lone surrogate in plain data by U+FFFD, and tuples by lists; other objects remain."""
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return [replace_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
