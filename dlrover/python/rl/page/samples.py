# SPDX-License-Identifier: Apache-2.0
"""The samples of a run's steps, and the answers of its evaluations, read without an index: steps rise within a file."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.common.private_files import open_file
from dlrover.python.rl.page.curves import number_of

Row = dict[str, Any]

_STEP = re.compile(rb'\{"step": ?([0-9]+)[,}]')
_PART = re.compile(r"steps-(\d+)\.jsonl")
_EVALUATION = re.compile(r"step-(\d+)\.jsonl")
_NUMBER = re.compile(r"\d+")
_CHUNK = 1 << 16
_LINEAGE = (
    "prompt_id", "sample_index", "retry", "trajectory", "version", "min_version", "staleness", "rank", "update",
    "advantage", "reward",
)  # fmt: skip


def read_samples(folder: Path, step: int) -> list[Row]:
    """Return the samples of a step, of an earlier attempt while the step is being repeated; empty if it has none."""
    return _samples_in(_parts(folder, ".jsonl"), step) or _samples_in(_parts(folder, ".superseded.jsonl"), step)


def sample_steps(folder: Path) -> tuple[int, int] | None:
    """Return the first and the last step with samples; None without any."""
    parts = list(_parts(folder, ".jsonl").values())
    limits = [limit for part in (*parts[:1], *parts[-2:]) for limit in _limits(part)]
    return (min(limits), max(limits)) if limits else None


def read_evaluations(folder: Path) -> list[int]:
    """Return the steps of the evaluations whose answers were kept; of an older run 0, for the last one."""
    steps = sorted(_numbered(folder / "evaluations", _EVALUATION))
    return steps or ([0] if (folder / "held_out.jsonl").is_file() else [])


def read_evaluation(folder: Path, step: int) -> list[Row]:
    """Return the answers of an evaluation; without ``prompt_id``, as SFT's, they are numbered."""
    path = _numbered(folder / "evaluations", _EVALUATION).get(step, folder / "held_out.jsonl")
    with suppress(OSError), open_file(path) as file:
        return [{"prompt_id": number, **row} for number, row in enumerate(filter(None, map(_row, file)))]
    return []


def lineage(folder: Path, step: int) -> list[Row]:
    """Return the samples that a step's update was made of: their prompts, the weights that wrote them, and where their
    gradients were computed."""
    rows = [row for row in read_samples(folder, step) if not row.get("mark")]
    return [{name: row[name] for name in _LINEAGE if name in row} for row in rows]


def select(rows: Sequence[Row], query: Mapping[str, str]) -> list[Row]:
    """Return the rows that match ``q`` (a text in prompt or completion), ``prompt`` (an id) and ``errors``, in the
    order of ``sort`` (reward, length, error or prompt) and ``order`` (asc or desc); rows without the value are last.
    Raises CallError."""
    keys: dict[str, Callable[[Row], Any]] = {
        "reward": lambda row: number_of(row.get("reward")),
        "length": lambda row: row.get("completion_tokens", len(str(row.get("completion", "")))),
        "error": lambda row: str(row["error"]) if row.get("error") else None,
        "prompt": lambda row: (_natural(str(row.get("prompt_id"))), row.get("sample_index", 0)),
    }
    sort, text = query.get("sort", ""), query.get("q", "").lower()
    if sort and sort not in keys:
        raise CallError(f"samples cannot be sorted by '{sort}'{hint(sort, keys)}")
    chosen = [
        row
        for row in rows
        if (not query.get("prompt") or str(row.get("prompt_id")) == query["prompt"])
        and (not query.get("errors") or row.get("error"))
        and (not text or any(text in str(row.get(name, "")).lower() for name in ("prompt", "completion", "answer")))
    ]
    if sort:
        present = [row for row in chosen if keys[sort](row) is not None]
        absent = [row for row in chosen if keys[sort](row) is None]
        chosen = sorted(present, key=keys[sort], reverse=query.get("order") == "desc") + absent
    return chosen


def _natural(text: str) -> str:
    """Return a key of sorting by which a number in a text counts as a number: 9 is before 11."""
    return _NUMBER.sub(lambda match: match[0].zfill(20), text)


def _parts(folder: Path, ending: str) -> dict[int, Path]:
    """Return the files of samples by their first steps: the newest file, and the files of earlier steps."""
    newest = folder / f"samples{ending}"
    first = _limits(newest)[:1]
    earlier = _numbered(folder / "samples", _PART) if ending == ".jsonl" else {}
    return dict(sorted((earlier | ({first[0]: newest} if first else {})).items()))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    with suppress(OSError):
        matches = {name: pattern.fullmatch(name) for name in os.listdir(folder)}
        return {int(match[1]): folder / name for name, match in matches.items() if match}
    return {}


def _samples_in(parts: dict[int, Path], step: int) -> list[Row]:
    first = max((number for number in parts if number <= step), default=None)
    if first is None:
        return []
    with suppress(OSError), open_file(parts[first]) as file:
        file.seek(_find(file, step))
        return list(_rows_of(file, step))
    return []


def _rows_of(file: BinaryIO, step: int) -> Iterator[Row]:
    """Yield the rows of a step from the file's position on."""
    for line in file:
        number = _step_of(line)
        if number != step:
            return
        row = _row(line)
        if row is not None:
            yield row


def _find(file: BinaryIO, step: int) -> int:
    """Return the position of the first line of ``step`` or a later one, by bisection over the bytes."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > _CHUNK:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        number = _step_of(file.readline(_CHUNK))
        if number is not None and number < step:
            low = middle
        else:
            high = middle
    file.seek(low)
    start = low if low == 0 else low + len(file.readline())
    file.seek(start)
    for line in file:
        number = _step_of(line)
        if number is None or number >= step:
            break
        start += len(line)
    return start


def _limits(part: Path) -> list[int]:
    """Return the steps of the first and of the last whole line of a file."""
    with suppress(OSError), open_file(part) as file:
        steps, end = [_step_of(file.readline())], file.seek(0, os.SEEK_END)
        size = _CHUNK
        while True:
            file.seek(max(end - size, 0))
            lines = file.read().rpartition(b"\n")[0].splitlines()
            steps.append(_step_of(lines[-1]) if lines else None)
            if steps[-1] is not None or size >= end:
                return [number for number in steps if number is not None]
            size *= 16
    return []


def _step_of(line: bytes) -> int | None:
    match = _STEP.match(line)
    return int(match[1]) if match else None


def _row(line: bytes) -> Row | None:
    with suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict):
            return row
    return None
