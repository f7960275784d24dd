# SPDX-License-Identifier: Apache-2.0
"""The interface of an algorithm: it annotates rows and defines the loss that a train engine runs."""

from typing import Protocol

import torch

from dlrover.python.rl.algorithm.losses.columns import Metrics, Needs, TokenColumns
from dlrover.python.rl.data.batch import Batch


class Algorithm(Protocol):
    """Turns rewards, or examples, into a gradient, in two independent halves.

    ``annotate`` gets the whole global batch and puts every normaliser into a weight per token; ``loss`` is a weighted
    sum over any subset of tokens, so the gradient does not depend on packing, micro-batches or ranks."""

    @property
    def needs(self) -> Needs:
        return Needs()

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Raise ValueError if the algorithm cannot learn from this many samples of a prompt."""
        return

    def annotate(self, rows: Batch) -> Batch:
        """Add the columns of the loss: ``weight`` (float32 ``[rows]``, for each action token of the row), and others.

        ``rows`` has a row per sequence of the global batch: dense ``action_tokens`` (int64: trained tokens); for
        samples ``prompt_id`` (int64) and ``reward`` (NaN: failed, excluded); for pairs ``pair`` (int64) and ``chosen``
        (bool); and :attr:`needs`. Rows with the same ``trajectory`` (int64) are one sample, whose reward is their sum.

        Added columns are dense ``[rows]`` or ragged ``[rows, seq]``, 0 on rows that failed or have no action token.
        Rows with the same number in an added ``unit`` must be in one micro-batch."""

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """Return the scalar weighted sum of token losses, and metrics that add up; DataError for a missing column.

        ``logprobs`` (or scores) of the action tokens under the current weights are ``[tokens]``, with gradient;
        ``columns`` are from :meth:`annotate` and :attr:`needs`, and ``unit``, by default the row of each token."""


class EngineLoss:
    """An algorithm's loss, with the metric ``entropy`` of the policy if it ``logs_entropy``. If it ``shares_forward``,
    rows without ``old_logprobs`` get the detached outputs (:meth:`Needs.shares_forward`)."""

    def __init__(self, algorithm: Algorithm, logs_entropy: bool = False, shares_forward: bool = False) -> None:
        self._algorithm, self._logs_entropy, self._shares_forward = algorithm, logs_entropy, shares_forward
        self.wants_entropy = logs_entropy or "entropy" in algorithm.needs.loss

    def __call__(self, outputs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        if self._shares_forward:
            columns = {"old_logprobs": outputs.detach(), **columns}
        value, metrics = self._algorithm.loss(outputs, columns)
        if self._logs_entropy and "entropy" not in metrics:
            metrics = {**metrics, "entropy": (columns["weight"] * columns["entropy"].detach()).sum()}
        return value, metrics


def select_added(rows: Batch, annotated: Batch) -> Batch:
    return annotated.select(*(name for name in annotated.columns if name not in rows))
