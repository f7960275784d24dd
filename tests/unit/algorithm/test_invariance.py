# SPDX-License-Identifier: Apache-2.0
"""Row 122: order, packing and ranks change neither the gradient nor the loss nor a metric, of any algorithm."""

import numpy as np
import pytest
import torch
from test_pairs import pairs_update
from test_policy import CONFIGS, entropies

from dlrover.python.rl.algorithm.distillation import Distillation, VocabularyDistillation
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.algorithm.sft import SFT
from tests.support.loss_updates import TEACHERS, assert_same, logprobs_for, outcome, ragged_update

ON_SAMPLES = {
    **CONFIGS,
    "sft": SFT(),
    "sft, sequences": SFT("sequence"),
    "distillation": Distillation(averaging="sequence", entropy_coef=0.1),
    "vocabulary_distillation": VocabularyDistillation(),
}
ON_PAIRS = {
    "reward_model": RewardModel(),
    "dpo": DPO(),
    "conservative": DPO(label_smoothing=0.1),
    "ipo": DPO(kind="ipo", token_means=True),
}
LAYOUTS = [(1, 10_000), (1, 12), (2, 20), (4, 1), (3, 30)]


def candidates(batch):
    generator = torch.Generator().manual_seed(3)
    shape = (len(batch.ragged("tokens").values), TEACHERS)
    return -1 - torch.rand(shape, generator=generator, dtype=torch.float64)


@pytest.mark.feature(122)
@pytest.mark.parametrize("name", ON_SAMPLES)
@pytest.mark.parametrize(("ranks", "budget"), LAYOUTS)
def test_samples(name, ranks, budget):
    algorithm, batch = ON_SAMPLES[name], ragged_update(9)
    logprobs = logprobs_for(batch, 9)
    made = {"entropy": entropies(batch), "candidate_logprobs": candidates(batch)}
    order = np.random.default_rng(ranks).permutation(len(batch))
    whole = outcome(algorithm, batch, logprobs, **made)
    assert whole.gradient.abs().max() > 1e-3
    assert_same(outcome(algorithm, batch, logprobs, order, ranks, budget, **made), whole)


@pytest.mark.feature(122)
@pytest.mark.parametrize("name", ON_PAIRS)
@pytest.mark.parametrize(("ranks", "budget"), LAYOUTS)
def test_pairs(name, ranks, budget):
    algorithm, batch = ON_PAIRS[name], pairs_update(5)
    logprobs = logprobs_for(batch, 5)
    order = np.random.default_rng(ranks).permutation(len(batch))
    whole = outcome(algorithm, batch, logprobs)
    assert whole.gradient.abs().max() > 1e-3
    assert_same(outcome(algorithm, batch, logprobs, order, ranks, budget), whole)


@pytest.mark.feature(122)
@pytest.mark.parametrize(("ranks", "budget"), LAYOUTS)
def test_the_critic(ranks, budget):
    algorithm, batch = PPO(), ragged_update(9)
    scores, order = logprobs_for(batch, 9), np.random.default_rng(ranks).permutation(len(batch))
    whole = outcome(algorithm, batch, scores, loss=algorithm.value_loss)
    assert_same(outcome(algorithm, batch, scores, order, ranks, budget, loss=algorithm.value_loss), whole)
