# SPDX-License-Identifier: Apache-2.0
"""Rewards of whole samples, of which an environment's have several rows."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.algorithm.losses.columns import SampleView
from dlrover.python.rl.data.batch import Batch

_ALIKE = ("prompt_id", "sample_index", "retry", "turns")
_SUMMED = ("reward", "score", "action_tokens", "token_count")


def number_samples(scored: Batch) -> npt.NDArray[np.int64]:
    """``[rows]``: the sample of each row, from 0, in the order of their first rows; see
    :class:`~dlrover.python.rl.algorithm.losses.columns.SampleView`."""
    of_row = SampleView.of(scored).of_row
    _, first = np.unique(of_row, return_index=True)
    numbers: npt.NDArray[np.int64] = np.argsort(np.argsort(first))[of_row]
    return numbers


def merge_rows(scored: Batch) -> Batch:
    """One row for each sample, in the order of their first rows, with those of these columns that ``scored`` has.

    ``prompt_id``, ``sample_index``, ``retry`` and ``turns``, which the rows of a sample share; the sums (float64) of
    ``reward``, its parts and ``score``, NaN where one row has none, and of ``action_tokens`` and ``token_count``;
    ``finished`` of the last row; ``staleness`` of the stalest. Rows must be in the order in which they were
    generated."""
    number = number_samples(scored)
    rows, count = np.arange(len(scored)), int(number.max(initial=-1)) + 1
    last, stalest = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.maximum.at(last, number, rows)
    columns = {name: scored.dense(name)[last] for name in (*_ALIKE, "finished") if name in scored}
    summed = [*(name for name in _SUMMED if name in scored), *part_columns(scored)]
    columns |= {name: np.bincount(number, scored.dense(name), count) for name in summed}
    if "staleness" in scored:
        np.maximum.at(stalest, number, scored.dense("staleness"))
        columns["staleness"] = stalest
    return Batch(columns)


def find_cut(rows: Batch) -> npt.NDArray[np.bool_]:
    """``[rows]``: True for those of samples whose last row has not finished."""
    cut: npt.NDArray[np.bool_] = ~merge_rows(rows).dense("finished")[number_samples(rows)]
    return cut


def part_columns(scored: Batch) -> list[str]:
    """The columns of the values of several reward functions."""
    return [name for name in scored.columns if name.startswith("reward/")]


SUMMARIES = ("mean", "std", "min", "max", "score")
"""The last part of the names of rewards' metrics, besides those of reward functions."""

Rewards = npt.NDArray[np.floating[Any]]
"""``[prompts, samples]``; NaN where an answer is unscored."""


def mean_reward(rewards: Rewards) -> float:
    """Mean over the scored answers; NaN when there is none."""
    scored = rewards[~np.isnan(rewards)]
    return float(scored.mean()) if len(scored) else float("nan")
