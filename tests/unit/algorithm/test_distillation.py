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
def test_a_teacher_like_the_student_teaches_nothing():
    batch = ragged_update(3).with_columns()
    old = batch.ragged("old_logprobs")
    same = batch.with_columns(teacher_logprobs=old).select(*(set(batch.columns) - {"teacher_weights"}))
    found = outcome(Distillation(), same, torch.from_numpy(old.values.astype(np.float64)))
    assert found.loss == 0
    assert not found.gradient.any()
    assert found.metrics["reverse_kl"] == 0


@pytest.mark.feature(124)
def test_the_expected_gradient_is_that_of_the_reverse_kl():
    student, teacher = logits_of(0, VOCAB).requires_grad_(), logits_of(1, VOCAB).log_softmax(-1)
    logprobs = student.log_softmax(-1)
    old = logprobs.detach()
    columns = {"weight": old.exp(), "old_logprobs": old, "teacher_logprobs": teacher}
    loss, metrics = Distillation().loss(logprobs, columns)
    (found,) = torch.autograd.grad(loss, student, retain_graph=True)
    exact = (logprobs.exp() * (logprobs - teacher)).sum()
    (wanted,) = torch.autograd.grad(exact, student)
    torch.testing.assert_close(found, wanted)
    assert metrics["reverse_kl"].item() == pytest.approx(exact.item())


@pytest.mark.parametrize("weighted", [True, False])
def test_several_teachers_are_averaged_in_log_probs(weighted):
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
    found = outcome(Distillation(), batch, old)
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert found.metrics["reverse_kl"] == pytest.approx(total / count, rel=1e-5)


def test_a_failed_reward_does_not_matter():
    batch = ragged_update(3)
    assert np.isnan(batch.dense("reward")[5])
    assert Distillation().annotate(batch).dense("weight")[5] > 0
    assert VocabularyDistillation().annotate(batch).dense("weight")[5] > 0


def test_there_is_no_reward_to_take_a_penalty_off():
    with pytest.raises(ValueError, match="distillation has no reward for a KL penalty"):
        Distillation(kl_in="reward")


# -- the vocabulary ---------------------------------------------------------------------------------------------------


def exact(student, teacher):
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    return (student.exp() * (student - teacher)).sum(-1)


@pytest.mark.feature(124)
@pytest.mark.parametrize("seed", range(4))
def test_with_the_whole_vocabulary_it_is_exact_and_so_is_its_gradient(seed):
    student, teacher = logits_of(seed, 5, VOCAB).requires_grad_(), logits_of(seed + 10, 5, VOCAB)
    values, ids = teacher.log_softmax(-1).topk(VOCAB)
    found = reverse_kl(student.log_softmax(-1).gather(1, ids), values)
    torch.testing.assert_close(found, exact(student, teacher), rtol=0, atol=1e-6)
    (slope,) = torch.autograd.grad(found.sum(), student)
    (wanted,) = torch.autograd.grad(exact(student, teacher).sum(), student)
    torch.testing.assert_close(slope, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_fewer_ids_give_a_lower_bound_that_grows_with_them(seed):
    student, teacher = logits_of(seed, 5, VOCAB), logits_of(seed + 10, 5, VOCAB)
    bounds = []
    for top in range(1, VOCAB + 1):
        values, ids = teacher.log_softmax(-1).topk(top)
        bounds.append(reverse_kl(student.log_softmax(-1).gather(1, ids), values))
    table = torch.stack(bounds)
    assert (table >= -1e-9).all()
    assert (table.diff(dim=0) >= -1e-6).all()
    assert (table <= exact(student, teacher) + 1e-6).all()


def test_two_ids_and_a_tail_by_hand():
    student, teacher = torch.tensor([0.5, 0.2]), torch.tensor([0.3, 0.6])
    wanted = 0.5 * math.log(0.5 / 0.3) + 0.2 * math.log(0.2 / 0.6) + 0.3 * math.log(0.3 / 0.1)
    assert reverse_kl(student.log(), teacher.log()).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.feature(124)
def test_equal_distributions_have_no_loss_and_no_gradient():
    student = logits_of(2, 4, VOCAB).float().requires_grad_()
    for top in (1, 3, VOCAB):
        mine = student.log_softmax(-1).topk(top).values
        columns = columns_of(4, candidate_logprobs=mine, teacher_logprobs=mine.detach())
        loss, _ = VocabularyDistillation().loss(torch.zeros(4), columns)
        (slope,) = torch.autograd.grad(loss, student)
        assert loss.item() == pytest.approx(0, abs=1e-6)
        assert slope.abs().max() < 1e-6


def test_several_teachers_each_have_their_ids():
    student, teachers = logits_of(0, 3, VOCAB), [logits_of(seed, 3, VOCAB) for seed in (1, 2)]
    shares = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.25, 0.75]], dtype=torch.float64)
    known = [teacher.log_softmax(-1).topk(4) for teacher in teachers]
    ids, values = (torch.cat([getattr(one, part) for one in known], dim=1) for part in ("indices", "values"))
    mine = student.log_softmax(-1).gather(1, ids)
    columns = columns_of(3, candidate_logprobs=mine, teacher_logprobs=values, teacher_weights=shares)
    loss, metrics = VocabularyDistillation().loss(torch.zeros(3), columns)
    parts = [reverse_kl(mine[:, 4 * at : 4 * at + 4], known[at].values) for at in (0, 1)]
    wanted = sum((shares[:, at] * parts[at]).sum() for at in (0, 1)) / 3
    assert loss.item() == pytest.approx(wanted.item())
    assert metrics["reverse_kl"].item() == pytest.approx(wanted.item())


def test_what_does_not_fit_together_is_refused():
    three = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(DataError, match="do not fit 1 teachers"):
        VocabularyDistillation().loss(
            torch.zeros(2), columns_of(2, candidate_logprobs=three, teacher_logprobs=three[:, :2])
        )
    with pytest.raises(DataError, match="do not fit 2 teachers"):
        weights = torch.full((2, 2), 0.5, dtype=torch.float64)
        columns = columns_of(2, candidate_logprobs=three, teacher_logprobs=three, teacher_weights=weights)
        VocabularyDistillation().loss(torch.zeros(2), columns)
    with pytest.raises(DataError, match="are not for 2 teachers"):
        columns = columns_of(2, old_logprobs=torch.zeros(2), teacher_logprobs=torch.zeros(2, 2))
        Distillation().loss(torch.zeros(2), {**columns, "teacher_weights": torch.ones(2, 3)})
