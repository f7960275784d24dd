"""Rows from wherever they are: a JSON, JSON Lines, CSV, Parquet or Arrow file, a folder, or the hub."""

import csv
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from dlrover.python.rl.common.errors import MissingExtra, Problem
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.data.jsonl import NumberedRow, scan_json, scan_jsonl, unreadable
from dlrover.python.rl.data.messages import plain_row

_LOG = get_logger(__name__)

DEFAULT_SPLIT = "train"

_STRUCTURED = ("messages", "extra_info")
_CONVERSATIONS = ("prompt", "chosen", "rejected")
_SPLIT = re.compile(r"([\w.-]+)(?:\[(-?[0-9]+%?)?:(-?[0-9]+%?)?\])?")


@dataclass(frozen=True)
class Rows(Sequence[dict[str, Any]]):
    """Rows and where each stands.

    Attributes:
        where: the source as it was named.
        numbered: each row with its line, or its number from 1 where the source has no lines.
    """

    where: str
    numbered: Sequence[NumberedRow]

    def __len__(self) -> int:
        return len(self.numbered)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> "Rows": ...

    def __getitem__(self, index: int | slice) -> "dict[str, Any] | Rows":
        if isinstance(index, slice):
            return Rows(self.where, self.numbered[index])
        return self.numbered[index][1]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row for _, row in self.numbered)

    def place(self, index: int) -> str:
        """What a problem with a row calls it: ``data.jsonl:7``."""
        return f"{self.where}:{self.numbered[index][0]}"

    def take(self, indices: Sequence[int]) -> "Rows":
        """The rows at ``indices``, in that order."""
        return Rows(self.where, [self.numbered[index] for index in indices])


@dataclass(frozen=True)
class _Named:
    """``split[start:stop]@place`` taken apart."""

    place: str
    split: str = DEFAULT_SPLIT
    start: str | None = None
    stop: str | None = None

    @classmethod
    def parse(cls, where: str) -> "_Named":
        before, at, place = where.partition("@")
        match = _SPLIT.fullmatch(before)
        return cls(place, *match.groups()) if at and match else cls(where)

    def slice(self, rows: int) -> slice:
        """The part of ``rows`` that is meant."""
        start, stop = (_bound(text, rows) for text in (self.start, self.stop))
        return slice(start, stop)


def _bound(text: str | None, rows: int) -> int | None:
    if text is None:
        return None
    return round(int(text[:-1]) * rows / 100) if text.endswith("%") else int(text)


def scan_rows(
    where: str | Path, keys: Mapping[str, str] | None = None, known: Collection[str] = ()
) -> tuple[Rows, list[Problem]]:
    """The good rows of a source, and a problem for each bad one; see :func:`plain_row` for how rows are made alike.

    Args:
        where: a file (``.json``, ``.jsonl``, ``.csv``; ``.parquet`` and ``.arrow`` need the extra ``data``, as all that
            follows does), a folder of such files or one that ``datasets`` has saved, or a name on the hub
            (``org/name`` or ``org/name:configuration``). ``split@`` before it picks a split, ``train`` by default;
            ``split[:100]@`` and ``split[10%:]@`` pick a part of one. A single file is the split ``train``.
        keys: the source's own name of a column, by the name that loaders know it by: ``{"prompt": "question"}``.
        known: the columns that are used; others that a table brings are left out, and logged. Of JSON every key is
            kept, for there a row may hold a misspelt one.
    """
    named = _Named.parse(str(where))
    numbered, problems, is_table = _read(named)
    numbered = numbered[named.slice(len(numbered))]
    if keys:
        numbered, missing = _renamed(numbered, keys, str(where))
        problems += missing
    rows = [(number, plain_row(row)) for number, row in numbered]
    if is_table and known and rows:
        rows = _only(rows, known, str(where))
    if not rows and not problems:
        problems = [Problem(str(where), "holds no rows")]
    return Rows(str(where), rows), [Problem(_named_as(where, named, item.where), item.what) for item in problems]


def _named_as(where: str | Path, named: _Named, place: str) -> str:
    return place.replace(named.place, str(where), 1) if place.startswith(named.place) else place


def _renamed(
    rows: Sequence[NumberedRow], keys: Mapping[str, str], where: str
) -> tuple[list[NumberedRow], list[Problem]]:
    theirs = {column: name for name, column in keys.items()}
    there = {key for _, row in rows for key in row}
    missing = [column for column in theirs if column not in there] if rows else []
    problems = [Problem(where, f"has no column '{column}'{hint(column, there)}") for column in missing]
    renamed = [
        (number, {theirs.get(key, key): value for key, value in row.items() if key in theirs or key not in keys})
        for number, row in rows
    ]
    return renamed, problems


def _only(rows: Sequence[NumberedRow], known: Collection[str], where: str) -> list[NumberedRow]:
    unused = sorted({key for _, row in rows for key in row if key not in known})
    if unused:
        _LOG.info("%s: columns that are not used: %s", where, ", ".join(unused))
    return [(number, {key: value for key, value in row.items() if key in known}) for number, row in rows]


def _read(named: _Named) -> tuple[list[NumberedRow], list[Problem], bool]:
    """The rows, what is wrong, and whether they come from a table, whose columns are the same in every row."""
    path = Path(named.place).expanduser()
    if path.is_dir():
        return *_load(named, str(path)), True
    readers = {".jsonl": scan_jsonl, ".json": scan_json, ".csv": _scan_csv, ".parquet": _scan_arrow}
    read = {**readers, ".arrow": _scan_arrow}.get(path.suffix.lower())
    if read is not None:
        if named.split != DEFAULT_SPLIT:
            return [], [Problem(named.place, f"a file is the split '{DEFAULT_SPLIT}'; it has no '{named.split}'")], True
        rows, problems = read(path)
        return rows, problems, path.suffix.lower() not in (".json", ".jsonl")
    if path.is_file():
        kinds = ", ".join([*readers, ".arrow"])
        return [], [Problem(named.place, f"a file of kind '{path.suffix}' cannot be read; known: {kinds}")], True
    if named.place.startswith((".", "/", "~")) or named.place.count("/") > 1:
        return [], [Problem(named.place, unreadable(path, FileNotFoundError()))], True
    return *_load(named, named.place), True


def _scan_csv(path: Path) -> tuple[list[NumberedRow], list[Problem]]:
    """Cells are texts, whatever they look like; ``messages`` and ``extra_info`` are JSON, and empty when absent."""
    rows: list[NumberedRow] = []
    problems: list[Problem] = []
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, cells in _records(file):
                problems += _add_cells(rows, line, cells, path)
    except OSError as error:
        return [], [Problem(str(path), unreadable(path, error))]
    except (UnicodeDecodeError, csv.Error) as error:
        problems.append(Problem(str(path), f"not CSV in UTF-8: {error}"))
    finally:
        csv.field_size_limit(limit)
    return rows, problems


def _records(file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record and the line it begins on."""
    reader = csv.DictReader(file, strict=True, restkey="")
    line = 1 + (reader.line_num if reader.fieldnames else 0)
    for cells in reader:
        yield line, cells
        line = reader.line_num + 1


def _add_cells(rows: list[NumberedRow], line: int, cells: Mapping[str, Any], path: Path) -> list[Problem]:
    try:
        rows.append((line, _cells(cells)))
    except ValueError as error:
        return [Problem(f"{path}:{line}", str(error))]
    return []


def _cells(cells: Mapping[str, Any]) -> dict[str, Any]:
    if "" in cells or None in cells.values():
        raise ValueError(f"has {'more' if '' in cells else 'fewer'} cells than the header")
    return {name: _cell(name, text) for name, text in cells.items()}


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


def _scan_arrow(path: Path) -> tuple[list[NumberedRow], list[Problem]]:
    """A Parquet or Arrow file by the library that ``datasets`` reads them with, without its copy in a cache."""
    if not path.is_file():
        return [], [Problem(str(path), unreadable(path, FileNotFoundError()))]
    try:
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        return [], [Problem(str(path), str(MissingExtra("datasets", "data")))]
    try:
        if path.suffix.lower() == ".parquet":
            table = pyarrow.parquet.read_table(path)
        else:
            with pa.memory_map(str(path)) as source:
                table = _arrow_table(pa, source)
        return list(enumerate(table.to_pylist(), start=1)), []
    except (pa.ArrowException, OSError) as error:
        return [], [Problem(str(path), f"cannot be read: {error}")]


def _arrow_table(pa: Any, source: Any) -> Any:
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:  # The stream form has no footer, and is what ``datasets`` writes.
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


def _load(named: _Named, place: str) -> tuple[list[NumberedRow], list[Problem]]:
    """A folder or a hub name, by ``datasets``."""
    try:
        import datasets
    except ImportError:
        return [], [Problem(named.place, str(MissingExtra("datasets", "data")))]
    folder = Path(place)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found: Any = datasets.load_from_disk(place)
        else:
            name, _, configuration = (place, "", "") if folder.is_dir() else place.partition(":")
            found = datasets.load_dataset(name, configuration or None)
        if not isinstance(found, datasets.DatasetDict):
            found = {DEFAULT_SPLIT: found}
        if named.split not in found:
            return [], [Problem(named.place, f"has no split '{named.split}'{hint(named.split, list(found))}")]
        return list(enumerate(found[named.split], start=1)), []
    except Exception as error:  # noqa: BLE001 - loading raises what file systems, the hub and parsers raise
        return [], [Problem(named.place, f"cannot be loaded: {type(error).__name__}: {error}")]
