"""Direct preference optimisation (Rafailov et al., arXiv:2305.18290, eq. 7) and two of its kin."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch.nn import functional

from dlrover.python.rl.algorithm.base import Metrics, Needs, TokenColumns, column
from dlrover.python.rl.algorithm.fields import check_fields
from dlrover.python.rl.algorithm.pairs import Margins, with_pairs
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class DPO:
    """With h how much more than the reference the policy prefers the chosen sequence, the mean over pairs of

    * ``sigmoid``: ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``; e is ``label_smoothing``. With e = 0 that
      is DPO; above, conservative DPO (Mitchell, "A note on DPO with noisy preferences", 2023);
    * ``ipo``: ``(h - 1 / (2 beta))^2`` (Azar et al., arXiv:2310.12036, eq. 17).
    """

    beta: Annotated[float, Gt(0.0)] = 0.1
    """How strongly the policy is held to the reference."""

    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """The loss of a pair."""

    label_smoothing: Annotated[float, Ge(0.0), Lt(0.5)] = 0.0
    """The share of pairs that are taken to be the wrong way round; for ``sigmoid``."""

    token_means: bool = False
    """Take h from means over tokens instead of sums, so that it does not grow with the length. That is how IPO's
    authors ran it, and TRL has it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing goes with kind 'sigmoid': ipo bounds the margin by itself")

    @property
    def needs(self) -> Needs:
        """See :class:`~dlrover.python.rl.algorithm.base.Algorithm`."""
        return Needs(loss=frozenset({"ref_logprobs"}))

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Any number will do: nothing is sampled."""

    def annotate(self, rows: Batch) -> Batch:
        """Add ``unit``, ``sign`` and ``weight``, see :func:`~dlrover.python.rl.algorithm.pairs.with_pairs`."""
        return with_pairs(rows, self.token_means)

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """Weighted sum over the pairs; ``accuracy``, and the mean rewards ``beta (log pi - log ref)`` of ``chosen`` and
        ``rejected`` sequences and their ``margin``."""
        pairs = Margins.of(logprobs - column(columns, "ref_logprobs"), columns)
        return (pairs.weight * self._of_pairs(pairs.margin)).sum(), pairs.metrics(self.beta)

    def _of_pairs(self, margin: torch.Tensor) -> torch.Tensor:
        if self.kind == "ipo":
            return (margin - 1 / (2 * self.beta)).square()
        right, wrong = functional.logsigmoid(self.beta * margin), functional.logsigmoid(-self.beta * margin)
        return -(1 - self.label_smoothing) * right - self.label_smoothing * wrong
