# SPDX-License-Identifier: Apache-2.0
"""Checks of a disturbed run whose rollouts run ahead. Which samples a step trains on depends on what was fast
there, so its bits are its own; but each problem is trained on once, in time, and every step with a whole batch."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dlrover.python.rl.data.prompts import load_prompts
from dlrover.python.rl.data.sampler import PromptCursor
from dlrover.python.rl.data.source import hold_out
from tests.chaos.verdict import final_states, read_rows, sample_faults, step_faults


def violations(job_dir: Path, config: Any) -> list[str]:
    """Return the violations of a finished run of this configuration."""
    rows = read_rows(job_dir / "samples.jsonl")
    return [
        *step_faults(job_dir, config.steps),
        *sample_faults(job_dir, config.steps),
        *_batch_faults(rows, config),
        *_problem_faults(rows, config),
        *_stale_rows(rows, config.rollout.max_staleness),
        *_end_faults(job_dir, config.steps),
    ]


def _batch_faults(rows: list[dict[str, Any]], config: Any) -> Iterator[str]:
    wanted = config.prompts_per_step * config.rollout.samples_per_prompt
    for step, count in sorted(Counter(row["step"] for row in rows).items()):
        if count != wanted:
            yield f"step {step} was trained on {count} samples, not {wanted}"


def _problem_faults(rows: list[dict[str, Any]], config: Any) -> Iterator[str]:
    """Rollouts run ahead by whole steps, so in all each problem comes as often as in a run without staleness."""
    prompts = load_prompts(str(config.data.train))
    train, _ = hold_out([row.prompt for row in prompts], config.data.eval_rows, config.seed)
    cursor = PromptCursor(len(train), config.prompts_per_step, config.seed)
    rows_in_order = chain.from_iterable(cursor.next() for _ in range(config.steps))
    wanted = Counter(train[row] for row in rows_in_order)
    counts = Counter(row["row"] for row in rows if row["sample_index"] == 0)
    if missing := wanted - counts:
        yield f"{missing.total()} groups were drawn from the data and never trained on: {sorted(missing)[:5]}"
    if more := counts - wanted:
        yield f"{more.total()} groups were trained on once too often: {sorted(more)[:5]}"


def _stale_rows(rows: list[dict[str, Any]], max_staleness: int) -> Iterator[str]:
    """Every step makes a version, so the rows of step ``n`` are trained on weights of version ``n - 1``."""
    stale = np.array([row["step"] - 1 - row["min_version"] for row in rows])
    if len(stale) and (stale.max() > max_staleness or stale.min() < 0):
        at = rows[int(np.argmax(stale))]
        yield f"staleness reaches from {stale.min()} to {stale.max()}, {max_staleness} allowed: first {at}"
    if len(stale) and not stale.any():
        yield "no sample was ever behind: nothing has run ahead"


def _end_faults(job_dir: Path, steps: int) -> Iterator[str]:
    step, states = final_states(job_dir)
    if step != steps:
        yield f"the last checkpoint is of step {step}, not {steps}"
    if states and states["trainer"]["staleness"]["object"]["open"]:
        yield f"groups are under way at the end: {states['trainer']['flight']['object']['open']}"
    if not (job_dir / "model" / "config.json").is_file():
        yield "no model was exported"
