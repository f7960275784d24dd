# SPDX-License-Identifier: Apache-2.0
"""Files of samples, one JSON object per line, with the lines of a step in one place, and excerpts for the console and
tables. The numbers of a row come from the trainer, and its texts from the rollouts.

::

    samples.jsonl                  the newest steps; at 64 MB the next step begins a new file
    samples/steps-000001.jsonl     the earlier ones, named after their first step

Steps rise in each file and from file to file, so a step is found by bisection."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice, repeat
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from dlrover.python.rl.common.disk_space import DEFAULT_DISK_WAIT, DiskWait, append, replace, retry_io
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.base.updates import check_same_samples

_LOG = get_logger(__name__)

SAMPLES, HELD_OUT, EVALUATIONS = "samples.jsonl", "held_out.jsonl", "evaluations"

TEXTS = ("prompt", "completion", "answer")

NUMBERS = (
    "set", "prompt_id", "sample_index", "retry", "trajectory", "reward", "score", "advantage", "mark", "reason",
    "error", "turns", "prompt_tokens", "completion_tokens", "version", "min_version", "staleness", "rank", "update",
)  # fmt: skip
"""The first columns of a line; the texts and others follow."""

PART_BYTES = 64 << 20  # above which the next step begins a new file

_TABLE = (*TEXTS, "reward", "score", "error")
_STEP = re.compile(rb'\{"step": ?([0-9]+)[,}]')


class Excerpt(NamedTuple):
    """The numbers of a step's first rows to print, with at most ``max_chars`` of a text, and to show in a table. The
    file gets the rows of the first ``samples``, and the tokens of the first ``tokens`` of them."""

    printed: int
    max_chars: int
    table: int
    samples: float = math.inf
    tokens: int = 0


class WriteRequest(NamedTuple):
    """The numbers of a step's samples, and where they are to be written. ``numbers`` has the columns of ``rows``;
    ``expected`` is the byte at which the lines of the step or of later ones begin, None if it is unknown."""

    file: Path
    step: int
    expected: int | None
    rows: Sequence[int]
    numbers: Batch
    excerpt: Excerpt

    def pack(self) -> bytes:
        """Encode the request with lists in place of arrays. Half of a surrogate pair in a text is escaped."""
        columns = to_lists(self.numbers.columns)
        try:
            return _PACKER.encode([str(self.file), *self[1:4], columns, self.excerpt])
        except UnicodeEncodeError:
            for name, cells in columns.items():
                columns[name] = [encode(cell).decode() if isinstance(cell, str) else cell for cell in cells]
            return self._replace(numbers=Batch(columns)).pack()

    @classmethod
    def unpack(cls, packed: bytes) -> "WriteRequest":
        file, step, expected, rows, columns, excerpt = msgspec.msgpack.decode(packed)
        return cls(Path(file), step, expected, rows, Batch(columns), Excerpt(*excerpt))


class Written(NamedTuple):
    end: int  # bytes of the file
    printed: list[str]
    table: list[dict[str, Any]]


@dataclass(frozen=True)
class SampleRows:
    """Plain rows: the columns that all of them have, in the files' order, and further values of some rows."""

    columns: Mapping[str, list[Any]]
    details: Mapping[int, Mapping[str, Any]]

    def __post_init__(self) -> None:
        assert len({*map(len, self.columns.values())}) == 1, "one value per row"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._row, range(len(self)))

    def records(self, step: int) -> list[Any]:
        """Return the rows with their step, as msgspec encodes them fastest. Raises ValueError for a column's name that
        has a quote, a backslash or a control character."""
        record = _record_class(tuple(self.columns))
        records: list[Any] = [*map(record, repeat(step), *self.columns.values())]
        for row in self.details:
            records[row] = {"step": step, **self._row(row)}
        return records

    def _row(self, row: int) -> dict[str, Any]:
        return {name: cells[row] for name, cells in self.columns.items()} | dict(self.details.get(row, {}))


@cache
def _record_class(columns: tuple[str, ...]) -> type[msgspec.Struct]:
    fields = {f"column_{number}": name for number, name in enumerate(("step", *columns))}
    return msgspec.defstruct("Record", list(fields), rename=fields, gc=False)


def format_rows(numbers: Batch, texts: Batch, tokens: Batch | None = None) -> SampleRows:
    """Join columns in the files' order. Rows that are ``detailed`` have lists for their completion's ``tokens``, whose
    rows are in the same order. Raises RowsDiffer if the texts are of other samples."""
    check_same_samples(texts, numbers)
    joined = {**numbers.columns, **texts.columns}
    token_names = [name for name in joined if name.startswith("token_")]
    first = [name for name in (*NUMBERS, *TEXTS) if name in joined]
    names = [*first, *(name for name in joined if name not in (*first, *token_names, "digest", "detailed"))]
    details = {}
    if tokens is not None and "detailed" in numbers:
        for at, row in enumerate(find_detailed(numbers)):
            lists = {name: value for name in token_names if (value := joined[name][row]) is not None}
            details[row] = _of_tokens(lists, tokens.row(at))
    return SampleRows(to_lists({name: joined[name] for name in names}), details)


def find_detailed(numbers: Batch) -> list[int]:
    return [row for row, is_detailed in enumerate(numbers["detailed"]) if is_detailed]


def to_lists(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in columns.items()}


def _of_tokens(values: Mapping[str, Any], tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lists of a completion's tokens; ``values`` has a list for the whole sequence or one for all tokens."""
    mask, count = tokens["action_mask"], len(tokens["tokens"])
    lists = {name: tokens[name] for name in ("tokens", "token_logprobs")}
    for name, value in values.items():
        whole = value if isinstance(value, list) else [value] * len(mask)
        lists[name] = [each for each, is_action in zip(whole, mask, strict=True) if is_action]
    assert all(len(each) == count for each in lists.values()), "one value per token"
    return lists


def write_step(
    file: Path,
    step: int,
    rows: Iterable[Mapping[str, Any]],
    excerpt: Excerpt,
    at: int | None = None,
    disk_wait: DiskWait = DEFAULT_DISK_WAIT,
) -> Written:
    """Write the lines of a step, all or none, at the end of the file or in place of what it has from byte ``at`` on."""
    samples = rows if isinstance(rows, SampleRows) else list(rows)
    start = at if at is not None else file.stat().st_size if file.exists() else 0
    if start >= PART_BYTES:
        if _first_step(file) < step:  # not a repetition of the call that began the file
            _end_part(file)
        at = 0
    is_whole = excerpt.samples == math.inf
    written = samples if is_whole else [row for row in samples if row.get("trajectory", 0) < excerpt.samples]
    content = format_lines(step, written)
    end = append(file, content, disk_wait, at)
    drop_superseded(file, step)
    if at is not None and end < at + len(content):
        _LOG.warning("%s was cut or removed during the run: rows before step %d are missing", file, step)
    printed = [_format_sample(row, excerpt.max_chars) for row in islice(samples, excerpt.printed)]
    return Written(end, printed, [_table_row(step, row) for row in islice(samples, excerpt.table)])


def write_evaluation(
    file: Path, step: int, rows: Iterable[Mapping[str, Any]], wait: DiskWait = DEFAULT_DISK_WAIT
) -> None:
    """Replace ``file``, the answers of the last evaluation, and write those after ``step`` to a separate file."""
    content = format_lines(step, rows)
    folder = file.with_name(EVALUATIONS)
    retry_io(lambda: folder.mkdir(exist_ok=True), folder, wait)
    replace(folder / f"step-{step:06}.jsonl", content, wait)
    replace(file, content, wait)


def cut_at_step(file: Path, step: int, expected: int | None = None) -> int:
    """Cut a file of rising steps before its first line of ``step`` or later, or the first torn one; returns its size.
    Lines before byte ``expected`` are not read if the cut can be there. After the first step, the removed lines are
    superseded: another file has them until their steps have been repeated."""
    parts = file.with_suffix("")
    while _first_step(file) >= step and (part := max(parts.glob("steps-*.jsonl"), default=None)) is not None:
        _supersede(file, file.read_bytes().splitlines(keepends=True) if step > 1 else [])
        part.replace(file)
    with open(file, "rb") as lines:
        size = expected if expected is not None and _can_begin_at(lines, expected, step) else 0
        lines.seek(size)
        for line in lines:
            match = _STEP.match(line)
            if match is None or int(match[1]) >= step or not line.endswith(b"\n"):
                break
            size += len(line)
        lines.seek(size)
        tail = [line for line in lines if line.endswith(b"\n")] if step > 1 else []
    _supersede(file, tail)
    os.truncate(file, size)
    return size


def _supersede(file: Path, lines: list[bytes]) -> None:
    """Put lines before those that are superseded already."""
    if lines:
        old = superseded(file)
        later = _lines_after(old, _step_of(lines[-1])) if old.exists() else []
        replace(old, b"".join([*lines, *later]))


def _first_step(file: Path) -> float:
    """Return the step of a file's first line, infinity without one."""
    with suppress(FileNotFoundError), open(file, "rb") as lines:  # absent: a worker died in _end_part
        return _step_of(lines.readline()) or math.inf
    return math.inf


def _end_part(file: Path) -> None:
    """Move the file to the earlier ones, and create an empty one in its place."""
    part = file.with_suffix("") / f"steps-{_first_step(file):06.0f}.jsonl"
    part.parent.mkdir(exist_ok=True)
    file.replace(part)
    file.touch()


def superseded(file: Path) -> Path:
    return file.with_suffix(".superseded.jsonl")


def drop_superseded(file: Path, step: int) -> None:
    """Remove the superseded lines of the steps up to ``step``, which are in ``file`` again."""
    old = superseded(file)
    if old.exists():
        replace(old, b"".join(_lines_after(old, step)))
        if not old.stat().st_size:
            old.unlink()


def _lines_after(file: Path, step: int) -> list[bytes]:
    return [line for line in file.read_bytes().splitlines(keepends=True) if _step_of(line) > step]


def _step_of(line: bytes) -> int:
    match = _STEP.match(line)
    return int(match[1]) if match is not None else 0


def _can_begin_at(lines: IO[bytes], at: int, step: int) -> bool:
    lines.seek(max(at - 1, 0))
    if at and lines.read(1) != b"\n":
        return False
    match = _STEP.match(lines.read(32))
    return match is None or int(match[1]) >= step


def _table_row(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in row.items() if name in _TABLE or name.startswith("reward/")}
    for name, value in shown.items():
        shown[name] = value if isinstance(value, float | None) else encode(str(value)).decode()
    return {"step": step, **replace_non_finite(shown)}


def _format_sample(row: Mapping[str, Any], max_chars: int) -> str:
    shown = []
    for name, value in row.items():
        if value in (None, "") or name in ("tokens", "rank", "update") or name.startswith("token_"):
            continue
        text = str(value)
        line = repr(text)[1:-1]
        cut = line if len(line) <= max_chars else f"{line[:max_chars]}... ({len(text)} characters)"
        shown.append(f"{name} {cut}")
    return "  ".join(shown)


def _plain(value: Any) -> Any:
    """Return the plain value of a numpy scalar, or of a subclass of str, int or float. Raises TypeError."""
    if isinstance(value, np.generic):
        return value.item()
    for kind, convert in ((str, str.__str__), (int, int), (float, float)):
        if isinstance(value, kind):
            return convert(value)
    raise TypeError(f"a sample has a value of type {type(value).__name__}, which JSON does not have")


_ENCODER, _PACKER = msgspec.json.Encoder(enc_hook=_plain), msgspec.msgpack.Encoder(enc_hook=_plain)


def format_line(row: Mapping[str, Any]) -> bytes:
    """Encode a row, with null for NaN and infinities, which JSON does not have."""
    try:
        return _ENCODER.encode(row) + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, as an error's text may have
        text = json.dumps(replace_non_finite(row), ensure_ascii=False, allow_nan=False, default=_plain)
        return encode(f"{text}\n")


def format_lines(step: int, rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode rows, with their step in front."""
    rows = rows if isinstance(rows, SampleRows) else list(rows)
    try:
        records = rows.records(step) if isinstance(rows, SampleRows) else [{"step": step, **row} for row in rows]
        return _ENCODER.encode_lines(records)
    except ValueError:  # of a name or a text
        return b"".join(format_line({"step": step, **row}) for row in rows)


def encode(text: str) -> bytes:
    """Encode a text; half of a surrogate pair, which an error's text may have, is escaped as in JSON."""
    return text.encode(errors="backslashreplace")


def replace_non_finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON does not have, by None, also in lists of tokens' values."""
    return {
        name: [_finite(each) for each in value] if name.startswith("token_") else _finite(value)
        for name, value in row.items()
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
