"""On-policy distillation over the vocabulary: at each state the student visits, the whole distribution is compared.

A sampled token says little of ``KL(student || teacher)``; the sum over the vocabulary has no noise from sampling at
all. But whole distributions do not travel: at a vocabulary of 150,000 a token costs 600 kB. So each teacher says its
k most likely ids and their log-probs (at k = 64, half a kB a token), and everything else is one more outcome, the tail:

    sum over the k ids of p log(p / q) + p_tail log(p_tail / q_tail)

Merging outcomes only makes a KL smaller, so this is a lower bound of the whole one, and it is exact for k = vocabulary.
Unlike a sum cut off at k it is a KL itself: never negative, 0 only where the student gives each id and the tail what
the teacher does, and it pulls mass back that the student has where the teacher has none. The ids are the teacher's: the
student's own would not show it what it lacks, and would cost a pass before the teacher's.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from dlrover.python.rl.algorithm.averaging import token_weights
from dlrover.python.rl.algorithm.base import Metrics, Needs, TokenColumns, column, weighted_sum
from dlrover.python.rl.algorithm.fields import check_fields
from dlrover.python.rl.algorithm.teachers import teacher_shares
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch

LEAST_TAIL = 1e-6
"""Tails are not taken for smaller than this: the sum of k float32 probabilities is no more exact."""


@dataclass(frozen=True)
class VocabularyDistillation:
    """The mean over tokens of ``KL(student || teacher)``, states held fixed. Rewards are not looked at."""

    averaging: Literal["token", "sequence"] = "token"
    """Mean over the tokens of the update, or over sequences of their token means."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs(self) -> Needs:
        """``candidates`` and ``teacher_logprobs``, ``[seq, k]``; with m teachers ``[seq, m * k]``, one's after the
        other's, and ``teacher_weights`` (dense ``[rows, m]``) that say how many there are and what each counts."""
        return Needs(loss=frozenset({"candidates", "teacher_logprobs", "candidate_logprobs"}))

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Any number will do: samples are not compared."""

    def annotate(self, rows: Batch) -> Batch:
        """Add ``weight``."""
        action_tokens = rows.dense("action_tokens")
        return rows.with_columns(weight=token_weights(action_tokens, action_tokens > 0, self.averaging))

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """Weighted sum over the tokens; ``reverse_kl`` is the same. ``logprobs`` are not looked at."""
        student, teacher = column(columns, "candidate_logprobs"), column(columns, "teacher_logprobs")
        weight, teachers = column(columns, "weight"), 1
        if "teacher_weights" in columns:
            teachers = columns["teacher_weights"].shape[1]
        if student.shape != teacher.shape or student.shape[1] % teachers:
            shapes = f"{list(student.shape)} and {list(teacher.shape)}"
            raise DataError(f"log-probs of candidates of shapes {shapes} are not those of {teachers} teachers")
        parts = (values.unflatten(1, (teachers, -1)) for values in (student, teacher))
        losses = (teacher_shares(columns, teachers) * reverse_kl(*parts)).sum(dim=1)
        return (weight * losses).sum(), {"reverse_kl": weighted_sum(weight, losses)}


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher) over k ids and the tail: ``[..., k]`` log-probs each to ``[...]``."""
    known = (student.exp() * (student - teacher)).sum(dim=-1)
    student_tail, teacher_tail = (_tail(logprobs) for logprobs in (student, teacher))
    return known + student_tail * (student_tail.log() - teacher_tail.log())


def _tail(logprobs: torch.Tensor) -> torch.Tensor:
    return (1 - logprobs.exp().sum(dim=-1)).clamp(min=LEAST_TAIL)
