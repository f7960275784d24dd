# SPDX-License-Identifier: Apache-2.0
"""Files of rows that jobs read and runs write."""

import json
from pathlib import Path

from tests.support.documented_metrics import undocumented

TIMES = ("time/", "speed/", "memory/")
"""Beginnings of the names of metrics that differ from run to run."""


def read_json(file):
    return json.loads(Path(file).read_text(encoding="utf-8"))


def read_lines(file):
    """The rows of a file of JSON Lines."""
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def write_rows(file, rows):
    """Rows as JSON Lines; the path."""
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def metrics_of(folder):
    """The metrics that a run logged, step by step, all of them in the glossary."""
    rows = read_lines(folder / "metrics.jsonl")
    assert undocumented(rows) == []
    return rows


def steps_of(folder):
    """The metrics of the steps from 1 on."""
    return [row for row in metrics_of(folder) if row["step"]]


def untimed(folder):
    """The metrics that two runs alike have alike."""
    return [{name: row[name] for name in row if not name.startswith(TIMES)} for row in metrics_of(folder)]
