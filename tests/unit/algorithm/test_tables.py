# SPDX-License-Identifier: Apache-2.0
"""Losses train a policy that is a table, one distribution over a few tokens, for 50 updates."""

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.cispo import CISPO
from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.distillation import Distillation, VocabularyDistillation
from dlrover.python.rl.algorithm.dr_grpo import DrGRPO
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.gspo import GSPO
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.algorithm.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from dlrover.python.rl.algorithm.rloo import RLOO
from dlrover.python.rl.data.batch import Batch, Ragged
from tests.support.loss_updates import outcome

VOCABULARY = 7
GROUPS, GROUP = 8, 16


def table(seed: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def divergence(logits: torch.Tensor, other: torch.Tensor) -> float:
    """KL(logits || other)."""
    own, target = logits.log_softmax(-1), other.log_softmax(-1)
    return float((own.exp() * (own - target)).sum())


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum()


def drawn(logits: torch.Tensor, reference: torch.Tensor, seed: int) -> tuple[Batch, torch.Tensor]:
    """Draw samples of one token each; return them and their ids."""
    rows, generator = GROUPS * GROUP, torch.Generator().manual_seed(seed)
    ids = torch.multinomial(logits.softmax(-1), rows, replacement=True, generator=generator)
    mask = Ragged.from_rows([[False, True]] * rows, dtype=np.bool_)

    def column(values):
        flat = np.zeros((2 * rows, *values.shape[1:]), dtype=np.float32)
        flat[1::2] = values.numpy()
        return mask.like(flat)

    columns = {
        "tokens": mask.like(np.arange(2 * rows)),
        "action_mask": mask,
        "prompt_id": np.repeat(np.arange(GROUPS), GROUP),
        "reward": np.zeros(rows),
        "action_tokens": np.ones(rows, dtype=np.int64),
        "old_logprobs": column(logits.log_softmax(-1)[ids]),
        "ref_logprobs": column(reference.log_softmax(-1)[ids]),
        "values": column(torch.zeros(rows)),
    }
    return Batch(columns), ids


def trained(algorithm, start, reference, steps=50, lr=1.0, more=lambda ids: {}, reward=None):
    """Return the table after ``steps`` updates; ``more`` gives further columns of the samples, ``[rows, ...]``."""
    logits = start.clone()
    for step in range(steps):
        rows, ids = drawn(logits, reference, step)
        if reward is not None:
            rows = rows.with_columns(reward=reward(ids).numpy())
        mask = rows.ragged("action_mask")
        extra = {name: mask.like(np.repeat(values.numpy(), 2, axis=0)) for name, values in more(ids).items()}
        leaf = logits.clone().requires_grad_()
        whole = leaf.log_softmax(-1)
        extra_outputs = {"entropy": entropy_of(leaf).expand(2 * len(ids))}
        if "candidates" in extra:
            extra_outputs["candidate_logprobs"] = whole[torch.from_numpy(extra["candidates"].values)]
        outputs = whole[ids.repeat_interleave(2)]
        detached = {name: values.detach() for name, values in extra_outputs.items()}
        actual = outcome(algorithm, rows.with_columns(**extra), outputs.detach(), **detached)
        tensors = [outputs, *extra_outputs.values()]
        parts = actual.gradient.split([tensor.numel() for tensor in tensors])
        torch.autograd.backward(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
        logits -= lr * leaf.grad
    return logits


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
TO_REFERENCE = {
    "loss, k2": GRPO(kl_coef=1.0, kl_estimator="k2"),
    "loss, k3": GRPO(kl_coef=1.0, kl_estimator="k3"),
    "reward, k1": RLOO(kl_coef=1.0),
    "reward, k1, by token": ReinforcePlusPlus(kl_coef=1.0),
    "advantage, k1": GRPO(kl_coef=1.0, kl_in="advantage", kl_estimator="k1"),
}


@pytest.mark.feature(117)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TO_REFERENCE)
def test_kl_penalty_moves_the_policy_to_the_reference(name, seed):
    start, reference = table(seed), table(100 + seed)
    after = trained(TO_REFERENCE[name], start, reference)
    assert divergence(after, reference) < 0.3 * divergence(start, reference)


@pytest.mark.feature(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_entropy_bonus_raises_the_entropy(seed):
    start = table(seed)
    after = trained(GRPO(entropy_coef=0.5), start, start)
    assert entropy_of(after) > entropy_of(start) + 0.05


FAMILY = [
    GRPO(), DrGRPO(), DAPO(), RLOO(), ReinforcePlusPlus(), ReinforcePlusPlusBaseline(), GSPO(), CISPO(), PPO()
]  # fmt: skip


@pytest.mark.feature(127)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", FAMILY, ids=lambda algorithm: type(algorithm).__name__)
def test_policy_gradients_raise_the_reward(algorithm, seed):
    start = table(seed)
    wanted = int(start.argmin())
    after = trained(algorithm, start, start, lr=2.0, reward=lambda ids: (ids == wanted).double())
    before, now = (logits.softmax(-1)[wanted].item() for logits in (start, after))
    assert now > max(2 * before, 0.5), (before, now)


@pytest.mark.feature(124)
@pytest.mark.parametrize("seed", SEEDS)
def test_distillation_of_sampled_tokens_reaches_the_teacher(seed):
    start, teacher = table(seed), table(50 + seed)
    logprobs = teacher.log_softmax(-1).float()
    after = trained(Distillation(), start, start, more=lambda ids: {"teacher_logprobs": logprobs[ids]})
    assert divergence(after, teacher) < 0.3 * divergence(start, teacher)


@pytest.mark.feature(124)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("top", [2, VOCABULARY])
def test_distillation_of_likely_ids_reaches_the_teacher(seed, top):
    start, teacher = table(seed), table(50 + seed)
    likeliest = teacher.log_softmax(-1).topk(top)

    def more(ids):
        columns = {"candidates": likeliest.indices, "teacher_logprobs": likeliest.values.float()}
        return {name: values.expand(len(ids), top) for name, values in columns.items()}

    after = trained(VocabularyDistillation(), start, start, more=more)
    assert divergence(after, teacher) < (0.1 if top == VOCABULARY else 0.7) * divergence(start, teacher)
    ends = (logits.softmax(-1)[likeliest.indices] for logits in (after, teacher))
    torch.testing.assert_close(*ends, rtol=0, atol=0.1)
