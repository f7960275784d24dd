# SPDX-License-Identifier: Apache-2.0
"""Write sums, differences and products of numbers up to ten, made by reasoning-gym, as prompts with answers.

    python examples/real_model/tasks.py [FOLDER]

There are 363 of them. 200 are held out; the others are trained on.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import reasoning_gym

TASK = "basic_arithmetic"
DIFFICULTY = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+", "-", "*"],
    "allow_parentheses": False,
}
SEED, DRAWS, HELD_OUT = 0, 10_000, 200
"""So many draws have every problem; no setting of a run changes which of them are held out."""

Row = Mapping[str, Any]


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``held_out.jsonl``; return their paths."""
    rows = list(distinct_rows(reasoning_gym.create_dataset(TASK, seed=SEED, size=DRAWS, **DIFFICULTY)))
    held_out, train = rows[:HELD_OUT], rows[HELD_OUT:]
    return write_rows(folder / "train.jsonl", train), write_rows(folder / "held_out.jsonl", held_out)


def distinct_rows(problems: Iterable[Mapping[str, Any]]) -> Iterable[Row]:
    """Yield each problem of reasoning-gym once, as a conversation of one question."""
    seen: set[str] = set()
    for problem in problems:
        expression = problem["metadata"]["expression"]
        if expression not in seen:
            seen.add(expression)
            yield {"messages": [{"role": "user", "content": problem["question"]}], "answer": problem["answer"]}


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(*write_tasks(Path(*sys.argv[1:2] or ["build/real_model"])), sep="\n")
