"""Rows as samples: a trajectory of an environment may be several rows, which are judged and averaged as one."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.algorithm.averaging import Averaging, token_weights
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Array, Batch, Ragged

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of an update.

    Attributes:
        rows: what they are made of.
        of_row: ``[rows]``: the sample of each row, from 0.
        action_tokens: ``[samples]``: trained tokens.
        counted: ``[samples]``: False on samples that failed or have no action token.
    """

    rows: Batch
    of_row: npt.NDArray[np.int64]
    action_tokens: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Batch, by: str = "trajectory") -> "Samples":
        """Rows with the same number in the column ``by`` are one sample; without that column each row is one."""
        numbers = rows.dense(by) if by in rows else np.arange(len(rows))
        _, of_row = np.unique(numbers, return_inverse=True)
        of_row = of_row.astype(np.int64)
        action_tokens = np.bincount(of_row, weights=rows.dense("action_tokens")).astype(np.int64)
        counted = action_tokens > 0
        if "reward" in rows:
            counted &= ~np.isnan(np.bincount(of_row, weights=rows.dense("reward")))
        return cls(rows, of_row, action_tokens, counted)

    @property
    def reward(self) -> Floats:
        """``[samples]``: the sum of each one's rows; NaN where it failed."""
        return np.bincount(self.of_row, weights=self.rows.dense("reward")).astype(np.float64)

    @property
    def prompt_id(self) -> npt.NDArray[np.int64]:
        """``[samples]``."""
        _, first = np.unique(self.of_row, return_index=True)
        found: npt.NDArray[np.int64] = self.rows.dense("prompt_id")[first]
        return found

    def weights(self, mode: Averaging, max_tokens: int | None = None) -> npt.NDArray[np.float32]:
        """``[rows]``: see :func:`~dlrover.python.rl.algorithm.averaging.token_weights`."""
        return self.spread(token_weights(self.action_tokens, self.counted, mode, max_tokens))

    def spread(self, values: Array) -> npt.NDArray[np.float32]:
        """Each sample's value on its rows that have action tokens, 0 on the others: ``[samples]`` to ``[rows]``."""
        return np.where(self.rows.dense("action_tokens") > 0, values[self.of_row], 0).astype(np.float32)

    @cached_property
    def tokens(self) -> "ActionTokens":
        """The action tokens of the samples that count."""
        return ActionTokens.of(self)


@dataclass(frozen=True, eq=False)
class ActionTokens:
    """Action tokens one sample after the other, each one's in the order they were chosen; observations are left out.

    Attributes:
        samples: whose they are; those that do not count have none.
        mask: ragged ``[rows, seq]``: the batch's.
        flat: ``[actions]``: where they stand among all tokens of the batch.
        lengths: ``[samples]``: how many each sample has.
    """

    samples: Samples
    mask: Ragged
    flat: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, samples: Samples) -> "ActionTokens":
        """The action tokens of the rows' ``action_mask``.

        Raises:
            DataError: it does not have ``action_tokens`` of them.
        """
        mask = samples.rows.ragged("action_mask")
        flat = np.flatnonzero(mask.values)
        row = np.searchsorted(mask.offsets, flat, side="right") - 1
        if not np.array_equal(np.bincount(row, minlength=len(mask)), samples.rows.dense("action_tokens")):
            raise DataError("'action_tokens' are not the numbers of tokens in 'action_mask'")
        sample = samples.of_row[row]
        kept = samples.counted[sample]
        order = np.argsort(sample[kept], kind="stable")
        return cls(samples, mask, flat[kept][order], np.where(samples.counted, samples.action_tokens, 0))

    def of_column(self, name: str) -> Floats:
        """The rows' ragged column at these tokens, ``[actions]``."""
        values = self.samples.rows.ragged(name)
        if not np.array_equal(values.offsets, self.mask.offsets):
            raise DataError(f"'{name}' and 'action_mask' have rows of different lengths")
        return values.values[self.flat].astype(np.float64)

    def sums(self, values: Floats) -> Floats:
        """``[actions]`` to the sum of each sample, ``[samples]``."""
        sample = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.bincount(sample, values, len(self.lengths)).astype(np.float64)

    def ragged(self, values: Floats) -> Ragged:
        """``[actions]`` as a float32 column ``[rows, seq]``, 0 everywhere else."""
        column = np.zeros(len(self.mask.values), dtype=np.float32)
        column[self.flat] = values
        return self.mask.like(column)

    def rewards(self) -> Floats:
        """``[actions]``: ``token_rewards`` where the rows have it, else each row's ``reward`` on its last action; that
        of a row without one goes to the action before it."""
        samples = self.samples
        if "token_rewards" in samples.rows:
            return self.of_column("token_rewards")
        rows = np.flatnonzero(samples.counted[samples.of_row])
        rows = rows[np.argsort(samples.of_row[rows], kind="stable")]
        starts = np.cumsum(self.lengths) - self.lengths
        last = np.cumsum(samples.rows.dense("action_tokens")[rows]) - 1
        rewards = np.zeros(len(self.flat))
        np.add.at(rewards, np.maximum(last, starts[samples.of_row[rows]]), samples.rows.dense("reward")[rows])
        return rewards
