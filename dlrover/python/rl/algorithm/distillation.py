# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: the student's own samples, compared with one or several teachers.

By sampled tokens (Agarwal et al., arXiv:2306.13649; Lu, "On-Policy Distillation", Thinking Machines, 2025): a token's
advantage is ``log pi_teacher - log pi_old``, without later tokens; in expectation this is the gradient of
``-KL(student || teacher)`` at each visited state, with states held fixed.

Over the vocabulary: each teacher sends its k most likely ids and their log-probs (all 150,000 would cost 600 kB a
token); all other ids are one more outcome, the tail:

    sum over the k ids of p log(p / q) + p_tail log(p_tail / q_tail)

Merging outcomes only lowers a KL: this is a lower bound, exact for k = vocabulary. Unlike a sum that stops at k it is a
KL, never negative, and it moves mass away from ids that the teacher does not send."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.losses.columns import (
    Metrics,
    Needs,
    TokenColumns,
    add_token_weights,
    column,
    weighted_sum,
)
from dlrover.python.rl.algorithm.losses.policy_gradient import PolicyGradient
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.config.typed import check_fields
from dlrover.python.rl.data.batch import Batch


def teacher_weights_of(columns: TokenColumns, teachers: int) -> torch.Tensor:
    """Return ``[tokens, teachers]``, rows summing to 1: the column ``teacher_weights``, or else equal weights.

    The mean of ``KL(student || teacher_m)`` is, up to a constant, the KL to the teachers' geometric mean."""
    reference = column(columns, "weight")
    if "teacher_weights" not in columns:
        return reference.new_full((len(reference), teachers), 1.0 / teachers)
    shares = columns["teacher_weights"]
    if shares.shape[1:] != (teachers,):
        raise DataError(f"'teacher_weights' of shape {list(shares.shape)} are not for {teachers} teachers")
    return shares


@dataclass(frozen=True)
class Distillation(PolicyGradient):
    """The clipped surrogate with the teacher's advantage; rewards are ignored."""

    compares_samples: ClassVar[bool] = False

    #: mean over the tokens of the update, or over sequences of their token means
    averaging: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in == "reward":
            raise ValueError("distillation has no reward for a KL penalty: set kl_in to 'loss' or 'advantage'")

    @property
    def needs(self) -> Needs:
        """``teacher_logprobs``: ``[seq]`` or ``[seq, teachers]``; dense ``[rows, teachers]`` ``teacher_weights``."""
        needs = super().needs
        return replace(needs, loss=needs.loss | {"teacher_logprobs"})

    def annotate(self, rows: Batch) -> Batch:
        return add_token_weights(rows, self.averaging)

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        """Adds ``reverse_kl``, the mean of k1 of KL(student || teacher)."""
        teacher = column(columns, "teacher_logprobs")
        if teacher.ndim == 2:
            teacher = (teacher * teacher_weights_of(columns, teacher.shape[1])).sum(dim=1)
        advantage = (teacher - column(columns, "old_logprobs")).detach()
        value, metrics = super().loss(logprobs, {**columns, "advantage": advantage})
        return value, {**metrics, "reverse_kl": weighted_sum(column(columns, "weight"), -advantage)}


MIN_TAIL = 1e-6  # lower bound of a tail: the rounding error of the sum of k float32 probabilities


@dataclass(frozen=True)
class VocabularyDistillation(Algorithm):
    """The mean over tokens of ``KL(student || teacher)``, states held fixed; rewards and ``logprobs`` are ignored."""

    #: mean over the tokens of the update, or over sequences of their token means
    averaging: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs(self) -> Needs:
        """Both ``[seq, k]``; with m teachers ``[seq, m * k]``, and ``teacher_weights`` (dense ``[rows, m]``)."""
        return Needs(loss=frozenset({"candidates", "teacher_logprobs", "candidate_logprobs"}))

    def annotate(self, rows: Batch) -> Batch:
        return add_token_weights(rows, self.averaging)

    def loss(self, logprobs: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, Metrics]:
        student, teacher = column(columns, "candidate_logprobs"), column(columns, "teacher_logprobs")
        weight, teachers = column(columns, "weight"), 1
        if "teacher_weights" in columns:
            teachers = columns["teacher_weights"].shape[1]
        if student.shape != teacher.shape or student.shape[1] % teachers:
            shapes = f"{list(student.shape)} and {list(teacher.shape)}"
            raise DataError(f"log-probs of candidates with shapes {shapes} do not fit {teachers} teachers")
        parts = (values.unflatten(1, (teachers, -1)) for values in (student, teacher))
        losses = (teacher_weights_of(columns, teachers) * reverse_kl(*parts)).sum(dim=1)
        return (weight * losses).sum(), {"reverse_kl": weighted_sum(weight, losses)}


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher) over k ids and the tail: ``[..., k]`` log-probs each to ``[...]``."""
    head = (student.exp() * (student - teacher)).sum(dim=-1)
    tail, teacher_tail = ((1 - logprobs.exp().sum(dim=-1)).clamp(min=MIN_TAIL) for logprobs in (student, teacher))
    return head + tail * (tail.log() - teacher_tail.log())
