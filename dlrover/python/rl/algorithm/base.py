"""What an algorithm is: it annotates rows, and names the loss that a train engine runs without knowing it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.data.batch import Batch

TokenColumns: TypeAlias = Mapping[str, torch.Tensor]
"""Columns aligned with the action tokens of a micro-batch, each ``[tokens]``, a few ``[tokens, n]``."""

Metrics: TypeAlias = dict[str, Any]
"""0-d tensors without gradient that add up, over micro-batches and ranks, to the weighted mean over the update."""

TokenLosses: TypeAlias = tuple[torch.Tensor, Metrics]
"""Losses ``[tokens]`` that are not weighted yet, and metrics that are."""


@dataclass(frozen=True)
class Needs:
    """Columns that an algorithm has to be given besides ``tokens`` and what :meth:`Algorithm.annotate` adds itself.

    ``old_logprobs`` are those of the policy before the update, computed by the train engine or, where no correction
    tells the two apart, by the rollout engine, whose own are ``rollout_logprobs``. ``ref_logprobs`` are a frozen
    reference's, ``teacher_logprobs`` a teacher's, ``values`` a critic's before each action.

    Attributes:
        annotate: ragged ``[rows, seq]``, in the rows that are annotated; ``action_mask`` may be one.
        loss: in the columns of the loss. The train engine itself makes ``entropy``, and ``candidate_logprobs`` where
            the batch has ``candidates``.
    """

    annotate: frozenset[str] = frozenset()
    loss: frozenset[str] = frozenset()

    @property
    def all(self) -> frozenset[str]:
        """Both."""
        return self.annotate | self.loss


class Algorithm(Protocol):
    """Turns rewards, or examples, into a gradient, in two halves that never see each other's side.

    ``annotate`` looks at the whole global batch and puts every normaliser into a weight per token; ``loss`` is then a
    plain weighted sum over whatever tokens it is handed. So the gradient does not depend on how rows are packed, cut
    into micro-batches or spread over ranks.
    """

    @property
    def needs(self) -> Needs:
        """The columns it has to be given."""
        ...

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Raise ValueError when the algorithm cannot learn from this many samples of a prompt."""
        ...

    def annotate(self, rows: Batch) -> Batch:
        """Add the columns of the loss: ``weight`` (float32 ``[rows]``, of each action token of the row), and others.

        Args:
            rows: one row per sequence of the global batch. Dense ``action_tokens`` (int64 ``[rows]``: trained tokens);
                for algorithms on samples ``prompt_id`` (int64) and ``reward`` (float; NaN: the sample failed and counts
                nowhere), for those on pairs ``pair`` (int64) and ``chosen`` (bool); and what :attr:`needs` says. Rows
                with the same number in ``trajectory`` (int64), in order, are one sample, whose reward is their sum;
                without that column each row is one.

        Returns:
            ``rows`` with the columns, each dense ``[rows]`` or ragged ``[rows, seq]``. All are 0 on rows that failed or
            have no action token. Rows with the same number in an added ``unit`` have to be in one micro-batch.
        """
        ...

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """The weighted sum of token losses.

        Args:
            logprobs: of the action tokens under the current weights (a reward model's scores), ``[tokens]``, with
                gradient.
            columns: those added by :meth:`annotate` spread over the tokens, and those of :attr:`needs`. The engine adds
                ``unit``, the row each token is of, where ``annotate`` does not.

        Returns:
            The scalar loss, and metrics that add up.

        Raises:
            DataError: a column is missing.
        """
        ...


class EngineLoss:
    """An algorithm's loss as train engines take it: one that wants entropies says so."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.wants_entropy = "entropy" in algorithm.needs.loss

    def __call__(self, outputs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """As :meth:`Algorithm.loss`."""
        return self._algorithm.loss(outputs, columns)


def added(rows: Batch, annotated: Batch) -> Batch:
    """The columns of ``annotated`` that ``rows`` has not: what the loss needs of them."""
    return annotated.select(*(name for name in annotated.columns if name not in rows))


def column(columns: TokenColumns, name: str) -> torch.Tensor:
    """The column ``name``, or a DataError that says what there is."""
    try:
        return columns[name]
    except KeyError:
        raise DataError(f"the loss needs the column '{name}'{hint(name, columns)}") from None


def weighted_sum(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``sum(weight * values)`` over ``[tokens]``, without gradient: a metric."""
    return (weight * values.detach()).sum()
