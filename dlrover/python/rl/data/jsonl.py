"""JSON and JSON Lines files, read whole: every malformed line is reported, not only the first."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.common.nearest import nearest

NumberedRow: TypeAlias = tuple[int, dict[str, Any]]
"""A row and the line it stands on, counted from 1."""

_SHOWN = 20
_MARK = b"\xef\xbb\xbf"


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a UTF-8 JSON Lines file, in order; blank lines are skipped.

    Raises:
        DataError: the file cannot be read, or lines are no JSON objects; names every such line (20 at most).
    """
    rows, problems = scan_jsonl(path)
    if problems:
        raise_problems(problems)
    return [row for _, row in rows]


def scan_jsonl(path: str | Path) -> tuple[list[NumberedRow], list[Problem]]:
    """The good rows of a JSON Lines file with their line numbers, and a problem for each bad line."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        return [], [Problem(str(path), unreadable(path, error))]
    return _lines(path, content.removeprefix(_MARK))


def scan_json(path: Path) -> tuple[list[NumberedRow], list[Problem]]:
    """The same of a JSON file: an array of objects, which are counted from 1, or JSON Lines under another name."""
    try:
        content = path.read_bytes().removeprefix(_MARK)
    except OSError as error:
        return [], [Problem(str(path), unreadable(path, error))]
    if not content.lstrip().startswith(b"["):
        return _lines(path, content)
    try:
        items = _parse(content)
    except ValueError as error:
        return [], [Problem(str(path), str(error))]
    rows = [(number, item) for number, item in enumerate(items, start=1) if isinstance(item, dict)]
    faults = {number: item for number, item in enumerate(items, start=1) if not isinstance(item, dict)}
    return rows, [Problem(f"{path}:{number}", _no_object(item)) for number, item in faults.items()]


def _lines(path: Path, content: bytes) -> tuple[list[NumberedRow], list[Problem]]:
    rows: list[NumberedRow] = []
    problems: list[Problem] = []
    # Not splitlines(): JSON strings may hold U+2028 and its kin unescaped.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, _parse_object(line)))
        except ValueError as error:
            problems.append(Problem(f"{path}:{number}", str(error)))
    return rows, problems


def raise_problems(problems: Sequence[Problem]) -> NoReturn:
    """Raise one :class:`DataError` with the first 20 ``problems`` and the number of the others."""
    raise DataError(first_problems(problems))


def first_problems(problems: Sequence[Problem]) -> list[Problem]:
    """The first 20 ``problems`` of a file, and the number of the others as one more."""
    shown = list(problems[:_SHOWN])
    hidden = len(problems) - len(shown)
    if hidden:
        file = shown[0].where.rsplit(":", 1)[0]
        shown.append(Problem(file, f"and {hidden} more problem{'s' if hidden > 1 else ''}"))
    return shown


def in_line_order(problems: Sequence[Problem]) -> list[Problem]:
    """``problems`` by the line number that ends their place; those of the whole file first."""

    def line(problem: Problem) -> int:
        number = problem.where.rpartition(":")[2]
        return int(number) if number.isdecimal() else 0

    return sorted(problems, key=line)


def _parse_object(line: bytes) -> dict[str, Any]:
    value = _parse(line)
    if not isinstance(value, dict):
        raise ValueError(_no_object(value))
    return value


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


def _no_object(value: Any) -> str:
    return f"not an object but {type(value).__name__}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name} is no number")


def unreadable(path: Path, error: OSError) -> str:
    """Why a file cannot be read, with the nearest name where there is none of this one."""
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read: {error.strerror}"
    if not path.parent.is_dir():
        return f"no such file; there is no folder {path.parent}"
    close = nearest(path.name, (file.name for file in path.parent.iterdir()))
    return f"no such file; did you mean '{close}'?" if close else "no such file"
