# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run by step, read from ``metrics.jsonl`` as it grows."""

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from dlrover.python.rl.common.private_files import open_file
from dlrover.python.rl.master.process.status import reward_of

Row: TypeAlias = Mapping[str, Any]  # "step", and metrics: numbers or None
Points: TypeAlias = dict[str, Any]

_SPARK, _LONGEST_LINE = 50, 1 << 20
_BLOCK = 100  # lines to parse together


class MetricsFile:
    """The rows of a file of metrics. :meth:`rows` parses only lines that were added, unless a resumed run has cut the
    file; a last line without its end is not read yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Row] = []
        self._end, self._last = 0, b""  # bytes that are parsed, and their last line
        self._lock = threading.Lock()  # requests for one run are answered by several threads

    def rows(self) -> list[Row]:
        """Return the rows in the order of their steps; empty without a file."""
        with suppress(OSError), self._lock, open_file(self._path) as file:
            if not self._continues(file):
                self._rows, self._end, self._last = [], 0, b""
            file.seek(self._end)
            content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            lines = whole.splitlines(keepends=True)
            for start in range(0, len(lines), _BLOCK):
                self._rows += parse_rows(lines[start : start + _BLOCK])
            self._end, self._last = self._end + len(whole), lines[-1] if lines else self._last
            return self._rows
        return []

    def _continues(self, file: BinaryIO) -> bool:
        file.seek(max(self._end - len(self._last), 0))
        return file.read(len(self._last)) == self._last


def parse_rows(lines: Sequence[bytes]) -> list[Row]:
    """Return the rows of some lines. Parsed together, rows share the names of their metrics: half of the memory."""
    with suppress(ValueError):
        rows = json.loads(b"[%b]" % b",".join(lines))
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]
    return list(filter(None, map(parse_row, lines)))


def parse_row(line: bytes) -> Row | None:
    """Return a line's row; None for a torn line or one without a step."""
    with suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
    return None


def last_row(path: Path) -> tuple[Row, float]:
    """Return the last whole row of a file and the Unix time of its last change; an empty row and 0 without one."""
    with suppress(OSError), open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LONGEST_LINE, 0))
        lines = file.read().rpartition(b"\n")[0].splitlines()
        return parse_row(lines[-1]) or {} if lines else {}, os.fstat(file.fileno()).st_mtime
    return {}, 0.0


def spark(path: Path) -> list[float | None]:
    """Return the rewards of about 50 rows, equally far apart in the file, or its losses if it has no rewards."""
    rows = []
    with suppress(OSError), open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        starts = range(0, size, max(size // _SPARK, 1))
        for start in starts:
            file.seek(start)
            if start:
                file.readline(_LONGEST_LINE)  # the rest of the line before
            rows.append(parse_row(file.readline(_LONGEST_LINE)))
    by_step = {row["step"]: row for row in rows if row}
    values = [number_of(reward_of({**{"reward": row.get("loss", math.nan)}, **row})) for row in by_step.values()]
    return values if any(value is not None for value in values) else []


def number_of(value: Any) -> float | None:
    """Return a finite number, and None for anything else."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def series_of(rows: Sequence[Row], names: Sequence[str], points: int) -> Points:
    """Return ``{"step": [...], "series": {name: [...]}}`` with at most about ``points`` steps. A bucket keeps
    the steps with the least and the largest value of each of the first three metrics, so that peaks stay."""
    shown = rows
    if len(rows) > points > 0:
        width = -(-len(rows) * 2 * min(len(names), 3) // points) or 1
        numbers = {0, len(rows) - 1}
        for start in range(0, len(rows), width):
            bucket = range(start, min(start + width, len(rows)))
            for name in names[:3]:
                with_value = [at for at in bucket if number_of(rows[at].get(name)) is not None]
                numbers |= {choose(with_value, key=lambda at: rows[at][name]) for choose in (min, max) if with_value}
        shown = [rows[at] for at in sorted(numbers)]
    return {
        "step": [row["step"] for row in shown],
        "series": {name: [number_of(row.get(name)) for row in shown] for name in names},
    }


def parts_of(row: Row, replacing_s: float = 0.0) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds of a step and its parts, the longest first, which add up to them; 0 without times. The trainer
    waited ``replacing_s`` for replacements, which the metrics count as its own code."""
    seconds = {name[5:]: number_of(value) or 0.0 for name, value in row.items() if name.startswith("time/")}
    total_s = seconds.pop("step", 0.0)
    seconds["trainer"] = seconds.get("trainer", 0.0) + total_s - sum(seconds.values()) if total_s else 0.0
    seconds["recovery"] = max(min(replacing_s, seconds["trainer"]), 0.0)
    seconds["trainer"] -= seconds["recovery"]
    parts = [{"name": name, "seconds": each} for name, each in seconds.items() if each]
    return total_s, sorted(parts, key=lambda part: -part["seconds"])
