# SPDX-License-Identifier: Apache-2.0
"""Files of rows that jobs read and runs write; their metrics are in the glossary ``docs/reference/metrics.md``."""

import json
import re
from functools import cache
from pathlib import Path

GLOSSARY = Path(__file__).parents[2] / "docs/reference/metrics.md"
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


@cache
def documented():
    """The first cells of the tables that explain metrics, as patterns; ``<function>`` is any name."""
    explained = GLOSSARY.read_text(encoding="utf-8").partition("## Names in other libraries")[0]
    cells = re.findall(r"^\| (.*?) \|", explained, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {name: re.compile(re.sub("<[a-z]+>", ".+", name)) for name in names}


def undocumented(rows):
    """Names of logged metrics that the glossary lacks."""
    names = {name for row in rows for name in row}
    return sorted(name for name in names if not any(each.fullmatch(name) for each in documented().values()))
