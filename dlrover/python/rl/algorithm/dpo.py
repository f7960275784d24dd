# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation (Rafailov et al., arXiv:2305.18290, eq. 7), conservative DPO and IPO."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch.nn import functional

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.losses.columns import (
    Metrics,
    Needs,
    TokenColumns,
    add_pair_columns,
    column,
    pair_margins,
)
from dlrover.python.rl.config.typed import check_fields
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class DPO(Algorithm):
    """The mean over pairs of a loss of h, the policy's margin over the reference's for the chosen sequence:

    * ``sigmoid``: ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``, e is ``label_smoothing``: DPO at e = 0,
      above it conservative DPO (Mitchell, "A note on DPO with noisy preferences", 2023);
    * ``ipo``: ``(h - 1 / (2 beta))^2`` (Azar et al., arXiv:2310.12036, eq. 17)."""

    beta: Annotated[float, Gt(0.0)] = 0.1  #: strength of the pull to the reference
    kind: Literal["sigmoid", "ipo"] = "sigmoid"  #: the loss of a pair
    label_smoothing: Annotated[float, Ge(0.0), Lt(0.5)] = 0.0  #: the assumed share of swapped pairs; for ``sigmoid``
    #: take h from means over tokens instead of sums, so that it does not grow with the length (IPO's authors, TRL)
    token_means: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing goes with kind 'sigmoid': ipo already bounds the margin")

    @property
    def needs(self) -> Needs:
        return Needs(loss=frozenset({"ref_logprobs"}))

    def annotate(self, rows: Batch) -> Batch:
        return add_pair_columns(rows, self.token_means)

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """``chosen``, ``rejected`` and ``margin`` are mean rewards ``beta (log pi - log ref)``."""
        margin, weight, metrics = pair_margins(logprobs - column(columns, "ref_logprobs"), columns, self.beta)
        if self.kind == "ipo":
            losses = (margin - 1 / (2 * self.beta)).square()
        else:
            straight, swapped = functional.logsigmoid(self.beta * margin), functional.logsigmoid(-self.beta * margin)
            losses = -(1 - self.label_smoothing) * straight - self.label_smoothing * swapped
        return (weight * losses).sum(), metrics
