# SPDX-License-Identifier: Apache-2.0
"""Rows of JSON, JSON Lines, CSV, Parquet or Arrow files, folders, or the hub, and rows held out for evaluation."""

import csv
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from hashlib import blake2b
from io import StringIO
from itertools import combinations, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

from dlrover.python.rl.common.errors import ConfigError, DataError, MissingExtra
from dlrover.python.rl.common.hub import current_lookup, how_to_cache, hub_fault, is_path
from dlrover.python.rl.common.names import hint, nearest
from dlrover.python.rl.data.jsonl import (
    NumberedRow,
    describe_unreadable,
    drop_nulls_of_calls,
    normalize_row,
    raise_errors,
    scan_jsonl,
    sort_by_line,
)

DEFAULT_SPLIT = "train"

_FOLDER_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow|txt|zip|tar|h5|xml)\b")  # also compressed: .jsonl.gz
_MOST_FILES = 10_000
_ALMOST = 0.75
_SPLIT = re.compile(r"([\w.-]+)(?:\[(-?[0-9]+%?)?:(-?[0-9]+%?)?\])?")


@dataclass(frozen=True)
class SourceRows:
    """Rows with their line, or number from 1, in the source ``where``."""

    where: str
    numbered: Sequence[NumberedRow]
    unused: Sequence[str] = ()  #: keys of rows that have no meaning, each with the key that may be meant

    def __len__(self) -> int:
        return len(self.numbered)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.numbered[index][1]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row for _, row in self.numbered)

    def location(self, index: int) -> str:
        """``data.jsonl:7``."""
        return f"{self.where}:{self.numbered[index][0]}"

    def take(self, indices: Sequence[int]) -> "SourceRows":
        return replace(self, numbered=[self.numbered[index] for index in indices])


@dataclass(frozen=True)
class _Address:
    """The parts of ``split[start:stop]@place``."""

    place: str
    split: str = DEFAULT_SPLIT
    start: str | None = None
    stop: str | None = None

    @classmethod
    def parse(cls, where: str) -> "_Address":
        """Take ``where`` apart; the whole of it is the place if a file or folder has this name."""
        if Path(where).expanduser().exists():
            return cls(where)
        before, at, place = where.partition("@")
        match = _SPLIT.fullmatch(before)
        return cls(place, *match.groups()) if at and match else cls(where)

    def slice(self, rows: int) -> slice:
        """Return the selected part of ``rows``."""
        bounds: list[int | None] = []
        for text in (self.start, self.stop):
            number = None if text is None else int(text.removesuffix("%"))
            is_share = number is not None and text is not None and text.endswith("%")
            bounds.append(round((number or 0) * rows / 100) if is_share else number)
        return slice(*bounds)


def scan_rows(where: str | Path, keys: Mapping[str, str] | None = None) -> tuple[SourceRows, list[ConfigError]]:
    """Return the good rows of a source, normalised (:func:`normalize_row`), and an error for each bad one.

    Args:
        where: a file (``.json``, ``.jsonl``, ``.csv``; with the extra ``data`` also ``.parquet`` and ``.arrow``), a
            folder of files or saved by ``datasets``, or a hub name (``org/name``, ``org/name:configuration``). A prefix
            ``split@`` selects a split (``train``), ``split[:100]@`` or ``split[10%:]@`` a part. A file is ``train``.
        keys: the source's column names: ``{"prompt": "question"}``. Several keys may share a column."""
    address = _Address.parse(str(where))
    numbered, errors, is_table = _read(address)
    numbered = numbered[address.slice(len(numbered))]
    if keys:
        numbered, missing = _rename_columns(numbered, keys, str(where))
        errors += missing
    rows = [
        (number, normalize_row(drop_nulls_of_calls(as_plain(row)) if is_table else row)) for number, row in numbered
    ]
    if not rows and not errors:
        errors = [ConfigError(str(where), "holds no rows")]
    places = [re.sub(f"^{re.escape(address.place)}", lambda _: str(where), error.where) for error in errors]
    return SourceRows(str(where), rows), [ConfigError(at, error.what) for at, error in zip(places, errors, strict=True)]


Normalize: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]
"""A function that returns a row in the form of its kind; raises DataError for other rows."""


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of one kind; ``where`` and ``keys`` as in :func:`scan_rows`."""

    normalize: Normalize
    #: returns the prompt of a row, text or messages; rows of one prompt are held out together
    prompt_of: Callable[[Mapping[str, Any]], Any] = itemgetter("prompt")
    #: returns why rows of the right form are useless together, or ""
    fault_of_all: Callable[[SourceRows], str] = lambda rows: ""
    names: Collection[str] = ()  #: the keys of a row that have a meaning
    uses_others: bool = False  #: other keys are for reward functions and environments

    def read(self, where: str | Path, keys: Mapping[str, str] | None = None) -> SourceRows:
        """Read the rows; raises DataError if there are none, or wrong ones (the first 20 are named)."""
        rows, errors = self.scan(where, keys)
        raise_errors(errors)
        return rows

    def scan(self, where: str | Path, keys: Mapping[str, str] | None = None) -> tuple[SourceRows, list[ConfigError]]:
        """Return the good rows, and the errors of the others."""
        rows, errors = scan_rows(where, keys)
        keys = keys or {}
        misspelt = [name for name in keys if name not in self.names and nearest(name, self.names)]
        key_faults = [f"a row has no '{name}'{hint(name, self.names)}" for name in misspelt]
        # Two keys with a meaning cannot share a column: an answer would be its own prompt.
        for first, second in combinations([name for name in keys if name in self.names], 2):
            if keys[first] == keys[second]:
                key_faults.append(f"'{first}' and '{second}' are both its column '{keys[first]}'")
        errors += [ConfigError(str(where), f"data.keys: {fault}") for fault in key_faults]
        checked, faults = normalize_rows(rows, self.normalize)
        if any(error.where == str(where) for error in errors):
            faults = []  # the rows lack keys that the file, or data.keys, has by another name
        elif not errors and not faults and (fault := self.fault_of_all(checked)):
            faults = [ConfigError(str(where), fault)]
        present = set() if self.uses_others else {name for row in rows for name in row}
        meant = {name: nearest(name, {*self.names} - present, _ALMOST) for name in sorted(present - {*self.names})}
        unused = [f"{name} (did you mean '{close}'?)" if close else name for name, close in meant.items()]
        return replace(checked, unused=unused), sort_by_line([*errors, *faults])


def normalize_rows(rows: SourceRows, normalize: Normalize) -> tuple[SourceRows, list[ConfigError]]:
    """Return the good rows, normalised, and the errors of the others."""
    numbered: list[NumberedRow] = []
    errors: list[ConfigError] = []
    for number, row in rows.numbered:
        try:
            numbered.append((number, normalize(row)))
        except DataError as error:
            errors += [ConfigError(f"{rows.where}:{number}", fault.what) for fault in error.errors]
    return SourceRows(rows.where, numbered), errors


def is_left_unread(where: str | Path) -> bool:
    """Return True for a data set on the hub if none is looked up."""
    place = _Address.parse(str(where)).place
    return current_lookup() == "none" and not Path(place).expanduser().exists() and not is_path(place, "dataset")


def _rename_columns(
    rows: Sequence[NumberedRow], keys: Mapping[str, str], where: str
) -> tuple[list[NumberedRow], list[ConfigError]]:
    names: dict[str, list[str]] = defaultdict(list)
    for name, column in keys.items():
        names[column].append(name)
    present = {key for _, row in rows for key in row}
    missing = [column for column in names if column not in present] if rows else []
    errors = [ConfigError(where, f"has no column '{column}'{hint(column, present)}") for column in missing]
    renamed = [
        (number, {to: row[key] for key in row if key in names or key not in keys for to in names.get(key, [key])})
        for number, row in rows
    ]
    return renamed, errors


def _read(address: _Address) -> tuple[list[NumberedRow], list[ConfigError], bool]:
    """Return rows, errors, and True for a table, whose rows have equal columns."""
    path = Path(address.place).expanduser()
    if path.is_dir():
        return *_load(address, str(path)), True
    if read := _READERS.get(path.suffix.lower()):
        if address.split != DEFAULT_SPLIT:
            fault = f"a file is the split '{DEFAULT_SPLIT}'; it has no '{address.split}'"
            return [], [ConfigError(address.place, fault)], True
        rows, errors = read(path)
        return rows, errors, path.suffix.lower() not in (".json", ".jsonl")
    if path.is_file():
        fault = f"a file of kind '{path.suffix}' cannot be read; known: {', '.join(_READERS)}"
        return [], [ConfigError(address.place, fault)], True
    if is_path(address.place, "dataset"):
        fault = describe_unreadable(path, FileNotFoundError())
        return [], [ConfigError(address.place, fault + how_to_cache(address.place, "dataset"))], True
    return *_load(address, address.place), True


def _load(address: _Address, place: str) -> tuple[list[NumberedRow], list[ConfigError]]:
    try:
        import datasets
    except ImportError:
        return [], [ConfigError(address.place, str(MissingExtra("datasets", "data")))]
    folder, fault = Path(place), ""
    name, _, configuration = (place, "", "") if folder.is_dir() else place.partition(":")
    if not folder.is_dir():
        fault = (why := hub_fault("dataset", name)) and f"is no file or folder, and {why}"
    is_offline = datasets.config.HF_HUB_OFFLINE
    try:
        datasets.config.HF_HUB_OFFLINE = is_offline or bool(fault)  # reads the cache only, without retries
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            splits: Any = datasets.load_from_disk(place)
        elif folder.is_dir() and not any(
            _FOLDER_FILE.search(path.name.lower()) for path in islice(folder.rglob("*"), _MOST_FILES)
        ):
            return [], [ConfigError(address.place, f"holds no {', '.join(f'*{kind}' for kind in _READERS)}")]
        else:
            splits = datasets.load_dataset(name, configuration or None)
        if not isinstance(splits, datasets.DatasetDict):
            splits = {DEFAULT_SPLIT: splits}
        if address.split not in splits:
            message = f"has no split '{address.split}'{hint(address.split, list(splits))}"
            return [], [ConfigError(address.place, message)]
        return list(enumerate(splits[address.split], start=1)), []
    except Exception as error:  # noqa: BLE001 - file systems, the hub and parsers raise any error
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        return [], [ConfigError(address.place, fault or f"cannot be loaded: {type(error).__name__}: {error}{cause}")]
    finally:
        datasets.config.HF_HUB_OFFLINE = is_offline


# -- tables -----------------------------------------------------------------------------------------------------------

_STRUCTURED = ("messages", "extra_info")
_CONVERSATION_CELLS = ("prompt", "chosen", "rejected")
_NO_JSON = object()
_BEYOND = "\0beyond the header"  # the key of cells that a row has beyond the header


def scan_csv(path: Path) -> tuple[list[NumberedRow], list[ConfigError]]:
    """Read texts; ``messages`` and ``extra_info`` are JSON, and empty if absent."""
    rows: list[NumberedRow] = []
    errors: list[ConfigError] = []
    limit = csv.field_size_limit(sys.maxsize)
    try:
        content = path.read_bytes().decode("utf-8-sig")
        for line, cells in _records(StringIO(content, newline="")):
            row = {name: _cell(name, text or "") for name, text in cells.items() if name}  # an index column has no name
            faults = [f"'{name}' is not JSON" for name, value in row.items() if value is _NO_JSON]
            if _BEYOND in cells or None in cells.values():
                faults = [f"has {'more' if _BEYOND in cells else 'fewer'} cells than the header"]
            errors += [ConfigError(f"{path}:{line}", fault) for fault in faults]
            rows += [] if faults else [(line, row)]
    except OSError as error:
        return [], [ConfigError(str(path), describe_unreadable(path, error))]
    except (UnicodeDecodeError, csv.Error) as error:
        errors.append(ConfigError(str(path), f"not CSV in UTF-8: {error}"))
    finally:
        csv.field_size_limit(limit)
    return rows, errors


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


def _cell(name: str, text: str) -> Any:
    if not text and name in (*_STRUCTURED, "answer"):
        return None
    if name in _STRUCTURED or (name in _CONVERSATION_CELLS and text.lstrip().startswith("[")):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return _NO_JSON if name in _STRUCTURED else text
        is_conversation = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
        return value if name in _STRUCTURED or (value and is_conversation) else text
    return text


def as_plain(value: Any) -> Any:
    """Return a cell with dates and times (ISO 8601), decimals and UUIDs as text, as in JSON."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | timedelta | UUID) else value


def scan_arrow(path: Path) -> tuple[list[NumberedRow], list[ConfigError]]:
    """Read with pyarrow instead of ``datasets``, whose cache would keep a copy."""
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
                is_stream = source.read(6) != b"ARROW1"  # ``datasets`` writes streams
                source.seek(0)
                table = (pa.ipc.open_stream if is_stream else pa.ipc.open_file)(source).read_all()
        return list(enumerate(table.to_pylist(), start=1)), []
    except (pa.ArrowException, OSError) as error:
        return [], [ConfigError(str(path), f"cannot be read: {error}")]


_READERS: Mapping[str, Callable[[Path], tuple[list[NumberedRow], list[ConfigError]]]] = {
    ".json": partial(scan_jsonl, may_be_array=True),
    ".jsonl": scan_jsonl,
    ".csv": scan_csv,
    ".parquet": scan_arrow,
    ".arrow": scan_arrow,
}
"""Readers of files by suffix."""


# -- held-out rows ----------------------------------------------------------------------------------------------------

HELD_OUT_SHARE = 0.03  # default share of rows held out


def hold_out(prompts: Sequence[Any], size: int | float = HELD_OUT_SHARE, seed: int = 0) -> tuple[list[int], list[int]]:
    """Choose rows for evaluation by a hash of seed and prompt: equal prompts are always on the same side.

    ``size`` is a count (int) or a fraction (float below 1; at least one row); only copies of the last chosen prompt can
    exceed it. Returns the indices for training and for evaluation, both rising. Raises ValueError if ``size`` leaves a
    side without a row, DataError if all rows are copies of the chosen prompts."""
    if isinstance(size, float):
        if not 0 < size < 1:
            raise ValueError(f"a held-out fraction must be between 0 and 1, not {size:g}")
        size = max(1, round(size * len(prompts)))
    if not 0 < size < len(prompts):
        raise ValueError(f"{size} of {len(prompts)} rows cannot be held out: both sides need a row")
    copies: dict[bytes, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        text = json.dumps([seed, prompt], sort_keys=True)
        copies[blake2b(text.encode(), digest_size=16).digest()].append(index)
    held_out: list[int] = []
    for digest in sorted(copies):
        if len(held_out) >= size:
            break
        held_out += copies[digest]
    if len(held_out) == len(prompts):
        raise DataError("the rows repeat too few prompts to hold any out: nothing would be left to train on")
    chosen = set(held_out)
    return [index for index in range(len(prompts)) if index not in chosen], sorted(held_out)
