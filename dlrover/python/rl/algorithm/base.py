"""What an algorithm is: it annotates rows, and names the loss that a train engine runs without knowing it."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.data.batch import Batch

TokenColumns: TypeAlias = Mapping[str, torch.Tensor]
"""Columns aligned with the action tokens of a micro-batch, each ``[tokens]``."""

Metrics: TypeAlias = dict[str, Any]
"""0-d tensors without gradient that add up, over micro-batches and ranks, to the weighted mean over the update."""


class Algorithm(Protocol):
    """Turns rewards into a gradient, in two halves that never see each other's side.

    ``annotate`` looks at the whole global batch and puts every normaliser into a weight per token; ``loss`` is then a
    plain weighted sum over whatever tokens it is handed. So the gradient does not depend on how rows are packed, cut
    into micro-batches or spread over ranks.
    """

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Raise ValueError when the algorithm cannot learn from this many samples of a prompt."""
        ...

    def annotate(self, rows: Batch) -> Batch:
        """Add the float32 columns ``advantage`` and ``weight``, both ``[rows]``.

        Args:
            rows: one row per sequence of the global batch, dense columns ``[rows]``: ``prompt_id`` (int64), ``reward``
                (float; NaN: the sample failed and counts nowhere) and ``action_tokens`` (int64: trained tokens).

        Returns:
            ``rows`` with both columns. ``weight`` belongs to each action token of the row; both are 0 on rows that
            failed or have no action token.
        """
        ...

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """The weighted sum of token losses.

        Args:
            logprobs: of the action tokens under the current weights, ``[tokens]``, with gradient.
            columns: ``advantage`` and ``weight`` spread over the tokens, ``old_logprobs``, and ``ref_logprobs`` where
                the algorithm uses a reference.

        Returns:
            The scalar loss, and metrics that add up.

        Raises:
            DataError: a column is missing.
        """
        ...


def counted_rows(rows: Batch) -> npt.NDArray[np.bool_]:
    """``[rows]``: True where a sample has a reward and a token to train."""
    return ~np.isnan(rows.dense("reward")) & (rows.dense("action_tokens") > 0)


def column(columns: TokenColumns, name: str) -> torch.Tensor:
    """The column ``name``, or a DataError that says what there is."""
    try:
        return columns[name]
    except KeyError:
        raise DataError(f"the loss needs the column '{name}'{hint(name, columns)}") from None


def weighted_sum(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``sum(weight * values)`` over ``[tokens]``, without gradient: a metric."""
    return (weight * values.detach()).sum()
