"""On-policy distillation by sampled tokens: the student's own samples, each token judged by the teacher.

Agarwal et al., arXiv:2306.13649; as policy gradient Lu, "On-Policy Distillation" (Thinking Machines, 2025). The
advantage of a token is ``log pi_teacher - log pi_old``, without a sum over what follows: in expectation over the token
that is the gradient of ``-KL(student || teacher)`` at each state visited, states held fixed.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from dlrover.python.rl.algorithm.averaging import token_weights
from dlrover.python.rl.algorithm.base import Metrics, Needs, TokenColumns, column, weighted_sum
from dlrover.python.rl.algorithm.policy import PolicyGradient
from dlrover.python.rl.algorithm.teachers import teacher_shares
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class Distillation(PolicyGradient):
    """The clipped surrogate with the teacher's advantage. Rewards are not looked at."""

    compares_samples: ClassVar[bool] = False

    averaging: Literal["token", "sequence"] = "token"
    """Mean over the tokens of the update, or over sequences of their token means."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in == "reward":
            raise ValueError("there is no reward that a KL penalty could be taken off: kl_in 'loss' or 'advantage'")

    @property
    def needs(self) -> Needs:
        """See :class:`~dlrover.python.rl.algorithm.base.Algorithm`. ``teacher_logprobs`` is of one teacher, or
        ``[seq, teachers]`` with ``teacher_weights`` (dense ``[rows, teachers]``) if they are not to be equal."""
        needs = super().needs
        return Needs(needs.annotate, needs.loss | {"teacher_logprobs"})

    def annotate(self, rows: Batch) -> Batch:
        """Add ``weight``."""
        action_tokens = rows.dense("action_tokens")
        return rows.with_columns(weight=token_weights(action_tokens, action_tokens > 0, self.averaging))

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """As every policy gradient's; and ``reverse_kl``, the mean of k1 of KL(student || teacher)."""
        teacher = column(columns, "teacher_logprobs")
        if teacher.ndim == 2:
            teacher = (teacher * teacher_shares(columns, teacher.shape[1])).sum(dim=1)
        advantage = (teacher - column(columns, "old_logprobs")).detach()
        value, metrics = super().loss(logprobs, {**columns, "advantage": advantage})
        return value, {**metrics, "reverse_kl": weighted_sum(column(columns, "weight"), -advantage)}
