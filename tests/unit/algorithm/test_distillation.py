# SPDX-License-Identifier: Apache-2.0
"""Distillation by hand, against slow references, and against the exact divergence over the vocabulary."""

import math

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.distillation import Distillation, VocabularyDistillation, reverse_kl
from dlrover.python.rl.common.errors import DataError
from tests.support.loss_updates import TEACHERS, outcome, ragged_update

VOCAB = 11


def columns_of(tokens, **columns):
    return {"weight": torch.full((tokens,), 1 / tokens, dtype=torch.float64), **columns}


def logits_of(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- sampled tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.feature(124)
def test_distillation_expected_gradient_is_of_the_reverse_kl():
    student, teacher = logits_of(0, VOCAB).requires_grad_(), logits_of(1, VOCAB).log_softmax(-1)
    logprobs = student.log_softmax(-1)
    old = logprobs.detach()
    columns = {"weight": old.exp(), "old_logprobs": old, "teacher_logprobs": teacher}
    loss, metrics = Distillation().loss(logprobs, columns)
    (actual,) = torch.autograd.grad(loss, student, retain_graph=True)
    exact = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(exact, student)
    torch.testing.assert_close(actual, expected)
    assert metrics["reverse_kl"].item() == pytest.approx(exact.item())


@pytest.mark.parametrize("weighted", [True, False])
def test_distillation_averages_teachers_in_log_probs(weighted):
    batch = ragged_update(6)
    if not weighted:
        batch = batch.select(*(set(batch.columns) - {"teacher_weights"}))
    old = torch.from_numpy(batch.ragged("old_logprobs").values.astype(np.float64))
    total, count = 0.0, 0
    for row in map(batch.row, range(len(batch))):
        shares = row["teacher_weights"] if weighted else [1 / TEACHERS] * TEACHERS
        for at in np.flatnonzero(row["action_mask"]):
            total += row["old_logprobs"][at] - sum(shares * row["teacher_logprobs"][at])
            count += 1
    actual = outcome(Distillation(), batch, old)
    assert actual.loss == pytest.approx(total / count, rel=1e-5)
    assert actual.metrics["reverse_kl"] == pytest.approx(total / count, rel=1e-5)


def test_distillation_counts_rows_of_failed_rewards():
    batch = ragged_update(3)
    assert np.isnan(batch.dense("reward")[5])
    assert Distillation().annotate(batch).dense("weight")[5] > 0
    assert VocabularyDistillation().annotate(batch).dense("weight")[5] > 0


# -- the vocabulary ---------------------------------------------------------------------------------------------------


def exact(student, teacher):
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    return (student.exp() * (student - teacher)).sum(-1)


@pytest.mark.feature(124)
@pytest.mark.parametrize("seed", range(4))
def test_reverse_kl_over_the_vocabulary_is_exact(seed):
    student, teacher = logits_of(seed, 5, VOCAB).requires_grad_(), logits_of(seed + 10, 5, VOCAB)
    values, ids = teacher.log_softmax(-1).topk(VOCAB)
    actual = reverse_kl(student.log_softmax(-1).gather(1, ids), values)
    torch.testing.assert_close(actual, exact(student, teacher), rtol=0, atol=1e-6)
    (slope,) = torch.autograd.grad(actual.sum(), student)
    (expected,) = torch.autograd.grad(exact(student, teacher).sum(), student)
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_reverse_kl_of_fewer_ids_is_a_growing_lower_bound(seed):
    student, teacher = logits_of(seed, 5, VOCAB), logits_of(seed + 10, 5, VOCAB)
    bounds = []
    for top in range(1, VOCAB + 1):
        values, ids = teacher.log_softmax(-1).topk(top)
        bounds.append(reverse_kl(student.log_softmax(-1).gather(1, ids), values))
    table = torch.stack(bounds)
    assert (table >= -1e-9).all()
    assert (table.diff(dim=0) >= -1e-6).all()
    assert (table <= exact(student, teacher) + 1e-6).all()


def test_reverse_kl_of_two_ids_and_a_tail_by_hand():
    student, teacher = torch.tensor([0.5, 0.2]), torch.tensor([0.3, 0.6])
    expected = 0.5 * math.log(0.5 / 0.3) + 0.2 * math.log(0.2 / 0.6) + 0.3 * math.log(0.3 / 0.1)
    assert reverse_kl(student.log(), teacher.log()).item() == pytest.approx(expected, rel=1e-5)


def test_vocabulary_distillation_of_teachers_with_own_ids():
    student, teachers = logits_of(0, 3, VOCAB), [logits_of(seed, 3, VOCAB) for seed in (1, 2)]
    shares = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.25, 0.75]], dtype=torch.float64)
    likeliest = [teacher.log_softmax(-1).topk(4) for teacher in teachers]
    ids, values = (torch.cat([getattr(one, part) for one in likeliest], dim=1) for part in ("indices", "values"))
    mine = student.log_softmax(-1).gather(1, ids)
    columns = columns_of(3, candidate_logprobs=mine, teacher_logprobs=values, teacher_weights=shares)
    loss, metrics = VocabularyDistillation().loss(torch.zeros(3), columns)
    parts = [reverse_kl(mine[:, 4 * at : 4 * at + 4], likeliest[at].values) for at in (0, 1)]
    expected = sum((shares[:, at] * parts[at]).sum() for at in (0, 1)) / 3
    assert loss.item() == pytest.approx(expected.item())
    assert metrics["reverse_kl"].item() == pytest.approx(expected.item())


THREE, ONES = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3)
TWO, TWO_TEACHERS = THREE[:, :2], {"teacher_weights": ONES[:, :2]}


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        (VocabularyDistillation, {"teacher_logprobs": TWO}, "do not fit 1 teachers"),
        (VocabularyDistillation, {"teacher_logprobs": THREE, **TWO_TEACHERS}, "do not fit 2 teachers"),
        (Distillation, {"teacher_logprobs": TWO, "teacher_weights": ONES}, "are not for 2 teachers"),
    ],
)
def test_distillation_refuses_columns_of_other_sizes(kind, columns, message):
    with pytest.raises(DataError, match=message):
        kind().loss(torch.zeros(2), columns_of(2, candidate_logprobs=THREE, old_logprobs=torch.zeros(2), **columns))
