# SPDX-License-Identifier: Apache-2.0
"""CSV, Parquet and Arrow files, with an error for each malformed record."""

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from dlrover.python.rl.common.errors import ConfigError, MissingExtra
from dlrover.python.rl.data.jsonl import NumberedRow, describe_unreadable

_STRUCTURED = ("messages", "extra_info")
_CONVERSATIONS = ("prompt", "chosen", "rejected")


def scan_csv(path: Path) -> tuple[list[NumberedRow], list[ConfigError]]:
    """Cells are texts; ``messages`` and ``extra_info`` are JSON, and empty if absent."""
    rows: list[NumberedRow] = []
    errors: list[ConfigError] = []
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, cells in _records(file):
                errors += _add_cells(rows, line, cells, path)
    except OSError as error:
        return [], [ConfigError(str(path), describe_unreadable(path, error))]
    except (UnicodeDecodeError, csv.Error) as error:
        errors.append(ConfigError(str(path), f"not CSV in UTF-8: {error}"))
    finally:
        csv.field_size_limit(limit)
    return rows, errors


_BEYOND = "\0beyond the header"
"""The key of cells that a row has beyond the header."""


def _records(file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each record and its first line."""
    reader = csv.DictReader(file, strict=True, restkey=_BEYOND)
    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    if twice := [name for name in reader.fieldnames if name and reader.fieldnames.count(name) > 1]:
        raise csv.Error(f"its header has {twice[0]!r} twice")
    line = 1 + (reader.line_num if reader.fieldnames else 0)
    for cells in reader:
        yield line, cells
        line = reader.line_num + 1


def _add_cells(rows: list[NumberedRow], line: int, cells: Mapping[str, Any], path: Path) -> list[ConfigError]:
    try:
        rows.append((line, _cells(cells)))
    except ValueError as error:
        return [ConfigError(f"{path}:{line}", str(error))]
    return []


def _cells(cells: Mapping[str, Any]) -> dict[str, Any]:
    if _BEYOND in cells or None in cells.values():
        raise ValueError(f"has {'more' if _BEYOND in cells else 'fewer'} cells than the header")
    return {name: _cell(name, text) for name, text in cells.items() if name}  # an index has no name


def _cell(name: str, text: str) -> Any:
    if not text and name in (*_STRUCTURED, "answer"):
        return None
    if name in _STRUCTURED or (name in _CONVERSATIONS and text.lstrip().startswith("[")):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            if name in _STRUCTURED:
                raise ValueError(f"'{name}' is not JSON") from None
            return text
        is_conversation = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
        return value if name in _STRUCTURED or (value and is_conversation) else text
    return text


def as_plain(value: Any) -> Any:
    """Return a cell with its dates and times (ISO 8601), decimals and UUIDs as text, which JSON and other processes
    have."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | timedelta | UUID) else value


def scan_arrow(path: Path) -> tuple[list[NumberedRow], list[ConfigError]]:
    """Reads with pyarrow instead of ``datasets``, whose cache would hold a copy."""
    if not path.is_file():
        return [], [ConfigError(str(path), describe_unreadable(path, FileNotFoundError()))]
    try:
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        return [], [ConfigError(str(path), str(MissingExtra("datasets", "data")))]
    try:
        if path.suffix.lower() == ".parquet":
            table = pyarrow.parquet.read_table(path)
        else:
            with pa.memory_map(str(path)) as source:
                table = _arrow_table(pa, source)
        return list(enumerate(table.to_pylist(), start=1)), []
    except (pa.ArrowException, OSError) as error:
        return [], [ConfigError(str(path), f"cannot be read: {error}")]


def _arrow_table(pa: Any, source: Any) -> Any:
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:  # The stream format, which ``datasets`` writes, has no footer.
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()
