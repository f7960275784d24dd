"""Whole samples: one of several rows, since a state did not go on from the last, is one sample in every figure too."""

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.data.batch import Batch

_ALIKE = ("prompt_id", "sample_index", "attempt", "turns")
_SUMMED = ("reward", "score", "action_tokens", "token_count")


def sample_of_row(scored: Batch) -> npt.NDArray[np.int64]:
    """``[rows]``: the sample of each row, from 0, in the order of their first rows.

    Which rows are one sample, the algorithm decides: see :class:`~dlrover.python.rl.algorithm.samples.Samples`.
    """
    of_row = Samples.of(scored).of_row
    _, first = np.unique(of_row, return_index=True)
    numbers: npt.NDArray[np.int64] = np.argsort(np.argsort(first))[of_row]
    return numbers


def whole_samples(scored: Batch) -> Batch:
    """One row for each sample, in the order of their first rows.

    Args:
        scored: what the trainer is told of rows, those of a sample in the order they were drawn; see
            :func:`~dlrover.python.rl.recipe.sample_rows.told_of`.

    Returns:
        Of these columns those that ``scored`` has: ``prompt_id``, ``sample_index``, ``attempt`` and ``turns``, which
        the rows of a sample share; the sums (float64) of ``reward`` and ``score``, NaN where one row has none, and of
        ``action_tokens`` and ``token_count``; ``finished`` of the last row; ``staleness`` of the stalest.
    """
    number = sample_of_row(scored)
    rows, count = np.arange(len(scored)), int(number.max(initial=-1)) + 1
    last, stalest = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.maximum.at(last, number, rows)
    columns = {name: scored.dense(name)[last] for name in (*_ALIKE, "finished") if name in scored}
    columns |= {name: np.bincount(number, scored.dense(name), count) for name in _SUMMED if name in scored}
    if "staleness" in scored:
        np.maximum.at(stalest, number, scored.dense("staleness"))
        columns["staleness"] = stalest
    return Batch(columns)
