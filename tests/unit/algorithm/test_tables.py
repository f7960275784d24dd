# SPDX-License-Identifier: Apache-2.0
"""What the terms of the losses do to a policy that is a table: where they move it in 50 updates."""

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
from tests.support.policy_tables import VOCABULARY, divergence, entropy_of, table, trained

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
def test_the_kl_penalty_moves_the_policy_to_the_reference(name, seed):
    start, reference = table(seed), table(100 + seed)
    after = trained(TO_REFERENCE[name], start, reference)
    assert divergence(after, reference) < 0.3 * divergence(start, reference)


@pytest.mark.feature(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_entropy_bonus_raises_the_entropy(seed):
    start = table(seed)
    after = trained(GRPO(entropy_coef=0.5), start, start)
    assert entropy_of(after) > entropy_of(start) + 0.05


FAMILY = [
    GRPO(), DrGRPO(), DAPO(), RLOO(), ReinforcePlusPlus(), ReinforcePlusPlusBaseline(), GSPO(), CISPO(), PPO()
]  # fmt: skip


@pytest.mark.feature(127)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", FAMILY, ids=lambda algorithm: type(algorithm).__name__)
def test_every_policy_gradient_raises_the_reward(algorithm, seed):
    start = table(seed)
    wanted = int(start.argmin())
    after = trained(algorithm, start, start, lr=2.0, reward=lambda ids: (ids == wanted).double())
    before, now = (logits.softmax(-1)[wanted].item() for logits in (start, after))
    assert now > max(2 * before, 0.5), (before, now)


@pytest.mark.feature(124)
@pytest.mark.parametrize("seed", SEEDS)
def test_sampled_tokens_teach_what_the_teacher_knows(seed):
    start, teacher = table(seed), table(50 + seed)

    def told(ids):
        return {"teacher_logprobs": teacher.log_softmax(-1)[ids].float()}

    after = trained(Distillation(), start, start, more=told)
    assert divergence(after, teacher) < 0.3 * divergence(start, teacher)


@pytest.mark.feature(124)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("top", [2, VOCABULARY])
def test_so_do_its_likeliest_ids(seed, top):
    start, teacher = table(seed), table(50 + seed)
    known = teacher.log_softmax(-1).topk(top)

    def told(ids):
        return {
            "candidates": known.indices.expand(len(ids), top),
            "teacher_logprobs": known.values.float().expand(len(ids), top),
        }

    after = trained(VocabularyDistillation(), start, start, more=told)
    assert divergence(after, teacher) < (0.1 if top == VOCABULARY else 0.7) * divergence(start, teacher)
    torch.testing.assert_close(after.softmax(-1)[known.indices], teacher.softmax(-1)[known.indices], rtol=0, atol=0.1)
