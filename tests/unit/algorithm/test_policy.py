# SPDX-License-Identifier: Apache-2.0
"""Policy gradients: by hand, against a slow reference, and in any order, packing or ranks."""

import math
import statistics
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from test_pairs import pairs_update

from dlrover.python.rl.algorithm.cispo import CISPO
from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.distillation import Distillation, VocabularyDistillation
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.dr_grpo import DrGRPO
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.gspo import GSPO
from dlrover.python.rl.algorithm.losses.columns import Needs
from dlrover.python.rl.algorithm.losses.values import ValueLoss
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.algorithm.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.algorithm.rloo import RLOO
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.data.batch import Batch
from tests.support.loss_updates import (
    TEACHERS,
    assert_same,
    logprobs_for,
    outcome,
    plain_samples,
    plain_weight,
    ragged_update,
    rows_of,
    run,
)

CLIPS = {"dual_clip": 1.2, "clip_low": 0.1, "clip_high": 0.15}
TERMS = {"kl_coef": 0.3, "entropy_coef": 0.2, "correction": "truncate", "correction_high": 1.1, **CLIPS}
MASK = {"correction": "mask"}
CONFIGS = {
    "grpo": GRPO(),
    "grpo, unbiased": GRPO(normalize="std_unbiased"),
    "grpo, all terms": GRPO(**TERMS),
    "grpo, k2": GRPO(kl_coef=0.5, kl_estimator="k2", averaging="token", normalize="none"),
    "grpo, KL in reward": GRPO(kl_coef=0.4, kl_in="reward", kl_estimator="k1"),
    "grpo, KL in advantage": GRPO(kl_coef=0.4, kl_in="advantage", kl_estimator="k2", averaging="token"),
    "grpo, masked sequences": GRPO(**MASK, correction_level="sequence", correction_low=0.7, correction_high=1.3),
    "dr_grpo": DrGRPO(),
    "dapo": DAPO(max_tokens=6, overlong_buffer=4, overlong_penalty=0.7),
    "rloo": RLOO(),
    "rloo, KL": RLOO(kl_coef=0.2, averaging="token"),
    "reinforce_pp": ReinforcePlusPlus(),
    "reinforce_pp, KL": ReinforcePlusPlus(kl_coef=0.1, gamma=0.9),
    "reinforce_pp_baseline": ReinforcePlusPlusBaseline(kl_coef=0.1),
    "gspo": GSPO(clip_low=0.05, clip_high=0.1),
    "gspo, all terms": GSPO(**TERMS, correction_level="sequence"),
    "cispo": CISPO(clip_low=0.2, clip_high=0.2),
    "ppo": PPO(),
    "ppo, KL": PPO(kl_coef=0.1, gamma=0.9, lam=0.8, whiten=False),
    "ppo, KL in the loss": PPO(kl_coef=0.1, kl_in="loss", kl_estimator="k3"),
}
KL = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: x + math.exp(-x) - 1}


def penalty(config, action):
    return config.kl_coef * KL[config.kl_estimator](action["old_logprobs"] - action["ref_logprobs"])


def in_reward(config):
    return config.kl_coef > 0 and config.kl_in == "reward"


def slow_rewards(config, samples):
    """One number for each sample."""
    rewards = []
    for sample in samples:
        reward = sample["reward"]
        if in_reward(config):
            reward -= sum(penalty(config, action) for action in sample["actions"])
        if isinstance(config, DAPO) and config.overlong_buffer:
            free = config.max_tokens - config.overlong_buffer
            over = (len(sample["actions"]) - free) / config.overlong_buffer
            reward -= config.overlong_penalty * min(max(over, 0), 1)
        rewards.append(reward)
    return rewards


def slow_gae(config, actions, rewards):
    gamma, lam = config.gamma, getattr(config, "lam", 1.0)
    values = [action["values"] if isinstance(config, PPO) else 0.0 for action in actions] + [0.0]
    advantages, later = [], 0.0
    for at in reversed(range(len(actions))):
        later = rewards[at] + gamma * values[at + 1] - values[at] + gamma * lam * later
        advantages.insert(0, later)
    return advantages


def slow_whiten(table):
    flat = [value for row in table for value in row]
    mean, deviation = statistics.mean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
    return [[(value - mean) / deviation for value in row] for row in table]


def slow_advantages(config, samples):
    """A list of the tokens' for each sample."""
    if isinstance(config, PPO | ReinforcePlusPlus):
        table = []
        for sample in samples:
            rewards = [action["reward"] for action in sample["actions"]]
            if in_reward(config):
                penalties = [penalty(config, action) for action in sample["actions"]]
                rewards = [reward - cost for reward, cost in zip(rewards, penalties, strict=True)]
            table.append(slow_gae(config, sample["actions"], rewards))
        return slow_whiten(table) if getattr(config, "whiten", True) else table
    rewards, table = slow_rewards(config, samples), []
    for sample, reward in zip(samples, rewards, strict=True):
        group = [r for other, r in zip(samples, rewards, strict=True) if other["prompt"] == sample["prompt"]]
        advantage = reward - statistics.mean(group)
        if isinstance(config, RLOO):
            baseline = (sum(group) - reward) / (len(group) - 1) if len(group) > 1 else reward
            advantage = reward - baseline
        elif (normalize := getattr(config, "normalize", "none")) != "none" and len(group) > 1:
            advantage /= {"std": statistics.pstdev, "std_unbiased": statistics.stdev}[normalize](group) + 1e-6
        table.append([advantage] * len(sample["actions"]))
    return slow_whiten(table) if isinstance(config, ReinforcePlusPlusBaseline) else table


def slow_surrogate(config, action, logprob, advantage, sequence_log_ratio):
    log_ratio = logprob - action["old_logprobs"]
    if isinstance(config, GSPO):
        log_ratio = sequence_log_ratio
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    if isinstance(config, CISPO):
        return -clipped * advantage * logprob
    objective = min(ratio * advantage, clipped * advantage)
    if config.dual_clip is not None and advantage < 0:
        objective = max(objective, config.dual_clip * advantage)
    return -objective


def slow_factor(config, actions, action):
    if config.correction == "none":
        return 1.0
    chosen = actions if config.correction_level == "sequence" else [action]
    ratio = math.exp(sum(one["old_logprobs"] - one["rollout_logprobs"] for one in chosen))
    if config.correction == "truncate":
        return min(ratio, config.correction_high)
    return ratio if config.correction_low <= ratio <= config.correction_high else 0.0


def slow_loss(config, batch, logprobs, entropy):
    """Sample by sample and token by token."""
    samples, total = plain_samples(batch), 0.0
    for sample, advantages in zip(samples, slow_advantages(config, samples), strict=True):
        actions, weight = sample["actions"], plain_weight(samples, sample, config.averaging)
        now = [float(logprobs[action["at"]]) for action in actions]
        moved = statistics.mean(new - action["old_logprobs"] for new, action in zip(now, actions, strict=True))
        for action, new, advantage in zip(actions, now, advantages, strict=True):
            if config.kl_coef > 0 and config.kl_in == "advantage":
                advantage -= penalty(config, action)
            loss = slow_surrogate(config, action, new, advantage, moved) * slow_factor(config, actions, action)
            if config.kl_coef > 0 and config.kl_in == "loss":
                loss += config.kl_coef * KL[config.kl_estimator](new - action["ref_logprobs"])
            loss -= config.entropy_coef * float(entropy[action["at"]])
            total += weight * loss
    return total


def entropies(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(len(batch.ragged("tokens").values), generator=generator, dtype=torch.float64)


TRAJECTORIES = ["grpo, KL in reward", "dapo", "rloo, KL", "reinforce_pp, KL", "reinforce_pp_baseline", "ppo, KL"]
UPDATES = [*((name, False) for name in CONFIGS), *((name, True) for name in TRAJECTORIES)]


@pytest.mark.feature(88, 111, 112, 114)
@pytest.mark.parametrize(("name", "trajectories"), UPDATES)
@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_equals_a_slow_reference(name, trajectories, seed):
    config, batch = CONFIGS[name], ragged_update(seed, trajectories)
    logprobs, entropy = logprobs_for(batch, seed), entropies(batch, seed)
    actual = outcome(config, batch, logprobs, entropy=entropy)
    assert actual.loss == pytest.approx(slow_loss(config, batch, logprobs, entropy), abs=2e-6)


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if not isinstance(config, CISPO)])
def test_policy_gradient_equals_the_loss_gradient(name):
    """Compare with differences; CISPO's gradient is another by design."""
    config, batch = CONFIGS[name], ragged_update(4)
    logprobs, entropy = logprobs_for(batch, 4), entropies(batch)
    gradient = outcome(config, batch, logprobs, entropy=entropy).gradient
    places = [action["at"] for sample in plain_samples(batch)[:4] for action in sample["actions"]]
    for at in places[:8]:
        step = torch.zeros_like(logprobs)
        step[at] = 1e-5
        up, down = (slow_loss(config, batch, logprobs + sign * step, entropy) for sign in (1, -1))
        assert gradient[at].item() == pytest.approx((up - down) / 2e-5, abs=2e-6)


def test_policy_needs_follow_from_the_configuration():
    assert GRPO().needs == Needs(loss=frozenset({"old_logprobs"}))
    assert GRPO(kl_coef=1).needs == Needs(loss=frozenset({"old_logprobs", "ref_logprobs"}))
    assert GRPO(**TERMS).needs.loss == {"old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy"}
    in_reward = GRPO(kl_coef=1, kl_in="reward").needs
    assert in_reward == Needs(frozenset({"action_mask", "old_logprobs", "ref_logprobs"}), frozenset({"old_logprobs"}))
    assert ReinforcePlusPlus().needs.annotate == {"action_mask"}
    assert PPO().needs.annotate == {"action_mask", "values"}


SEQUENCES = {"correction_level": "sequence"}


@pytest.mark.parametrize(
    ("config", "recomputes", "shares"),
    [
        (GRPO(), False, False),
        (GRPO(correction="truncate"), True, True),
        (GRPO(**MASK), True, True),
        (GRPO(correction="truncate", **SEQUENCES), True, False),
        (GRPO(**MASK, **SEQUENCES), True, False),
        (GSPO(), True, False),
        (GSPO(**MASK), True, False),
        (PPO(**MASK), True, True),
        (PPO(**MASK, **SEQUENCES), True, False),
        (Distillation(correction="truncate"), True, True),
        (Distillation(correction="truncate", **SEQUENCES), True, False),
        (VocabularyDistillation(), False, False),
    ],
)
def test_forward_is_shared_by_single_updates_on_tokens(config, recomputes, shares):
    assert config.needs.recomputes == recomputes
    assert config.needs.shares_forward(1) == shares
    assert not config.needs.shares_forward(2)


@pytest.mark.parametrize("config", [GRPO(), DrGRPO(), DAPO(), RLOO(), ReinforcePlusPlusBaseline(), GSPO(), CISPO()])
def test_group_of_one_is_refused_by_comparing_algorithms(config):
    config.check_group_size(2)
    with pytest.raises(ValueError, match="samples_per_prompt is 1"):
        config.check_group_size(1)
    for other in (PPO(), ReinforcePlusPlus()):
        other.check_group_size(1)


@pytest.mark.feature(117)
@pytest.mark.parametrize("kind", [GRPO, DrGRPO, DAPO, GSPO, CISPO, PPO, RLOO, ReinforcePlusPlus])
def test_k1_is_refused_as_a_loss_only(kind):
    with pytest.raises(ValueError, match="k1 cannot be a loss"):
        kind(kl_in="loss", kl_estimator="k1")
    for place in ("reward", "advantage"):
        kind(kl_in=place, kl_estimator="k1", kl_coef=0.1)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GRPO, {"clip_low": -0.1}, "clip_low: input should be greater than or equal to 0, got -0.1"),
        (GRPO, {"clip_low": 1.0}, "clip_low: input should be less than 1"),
        (GRPO, {"kl_coef": float("nan")}, "kl_coef: input should be greater than or equal to 0, got nan"),
        (GRPO, {"dual_clip": 1.0}, "dual_clip: input should be greater than 1"),
        (GRPO, {**MASK, "correction_low": 3, "correction_high": 2}, "correction_low 3 and correction_high 2"),
        (GRPO, {**MASK, "correction_low": 2}, "correction_low 2 and correction_high 2.0 are not around 1"),
        (GRPO, {"correction": "truncate", "correction_low": 0.5}, "correction_low: no effect with correction 'trun"),
        (GRPO, {"correction_level": "sequence", "correction_high": 2.0}, "correction_level, correction_high: no eff"),
        (GRPO, {"entropy_coef": -1}, "entropy_coef: input should be greater than or equal to 0"),
        (DrGRPO, {"averaging": "constant"}, "max_tokens goes with averaging 'constant'"),
        (DrGRPO, {"max_tokens": 5}, "max_tokens goes with averaging 'constant'"),
        (GSPO, {"averaging": "token"}, "averaging: input should be 'sequence'"),
        (CISPO, {"dual_clip": 3.0}, "dual_clip belongs to the clipped surrogate"),
        (DAPO, {"overlong_buffer": 3}, "max_tokens and overlong_buffer go together"),
        (DAPO, {"overlong_buffer": 5, "max_tokens": 4}, "overlong_buffer 5 is above max_tokens 4"),
        (DAPO, {"overlong_penalty": 1.0}, "overlong_penalty needs overlong_buffer and max_tokens"),
        (PPO, {"whiten": 1}, "whiten: input should be a valid boolean, got 1"),
        (PPO, {"lam": 1.5}, "lam: input should be less than or equal to 1"),
        (ReinforcePlusPlus, {"gamma": 1.1}, "gamma: input should be less than or equal to 1"),
        (ValueLoss, {"clip": 0.0}, "clip: input should be greater than 0"),
        (Distillation, {"kl_in": "reward"}, "distillation has no reward for a KL penalty"),
        (DPO, {"beta": 0}, "beta: input should be greater than 0"),
        (DPO, {"label_smoothing": 0.5}, "label_smoothing: input should be less than 0.5"),
        (DPO, {"kind": "ipo", "label_smoothing": 0.1}, "label_smoothing goes with kind 'sigmoid'"),
    ],
)
def test_algorithms_refuse_wrong_options(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@dataclass(frozen=True)
class Cautious(GRPO):
    correction_high: float = 1.5


def test_correction_bounds_may_be_defaults_of_a_class():
    assert Cautious().correction_high == Cautious(correction="truncate").correction_high == 1.5
    with pytest.raises(ValueError, match="correction_high: no effect"):
        Cautious(correction_high=2.0)


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
@pytest.mark.parametrize("name", [*ON_SAMPLES, *ON_PAIRS])
@pytest.mark.parametrize(("ranks", "budget"), LAYOUTS)
def test_layout_of_samples_and_pairs_changes_nothing(name, ranks, budget):
    algorithm, batch = {**ON_SAMPLES, **ON_PAIRS}[name], pairs_update(9) if name in ON_PAIRS else ragged_update(9)
    logprobs = logprobs_for(batch, 9)
    extra = {"entropy": entropies(batch), "candidate_logprobs": candidates(batch)}
    order = np.random.default_rng(ranks).permutation(len(batch))
    whole = outcome(algorithm, batch, logprobs, **extra)
    assert whole.gradient.abs().max() > 1e-3
    assert_same(outcome(algorithm, batch, logprobs, order, ranks, budget, **extra), whole)


@pytest.mark.feature(122)
@pytest.mark.parametrize(("ranks", "budget"), LAYOUTS)
def test_layout_of_values_changes_nothing(ranks, budget):
    algorithm, batch = PPO(), ragged_update(9)
    scores, order = logprobs_for(batch, 9), np.random.default_rng(ranks).permutation(len(batch))
    whole = outcome(algorithm, batch, scores, loss=algorithm.value_loss)
    assert_same(outcome(algorithm, batch, scores, order, ranks, budget, loss=algorithm.value_loss), whole)


def test_grpo_ignores_the_rounding_of_equal_rewards():
    sums = [33.3 + 66.7, 99.9 + 0.1, 0.1 + 0.2 + 99.7, 100.0 + 1e-8]
    rows = rows_of([1] * 4, sums, [1] * 4)
    assert len(set(sums)) > 1
    for normalize in ("none", "std", "std_unbiased"):
        assert GRPO(normalize=normalize).annotate(rows).dense("advantage").tolist() == [0] * 4


PAPER = DrGRPO(averaging="constant", max_tokens=10)


@pytest.mark.feature(111)
@pytest.mark.parametrize(("algorithm", "divisor"), [(DrGRPO(), 4), (PAPER, 20)])
def test_dr_grpo_by_hand(algorithm, divisor):
    annotated = algorithm.annotate(rows_of([4, 4], [1, 0], [1, 3]))
    assert annotated.dense("advantage").tolist() == [0.5, -0.5]
    assert annotated.dense("weight") == pytest.approx([1 / divisor] * 2)
    loss, gradient, metrics = run(algorithm, annotated, torch.full((4,), -1.0))
    assert loss == pytest.approx((-0.5 + 3 * 0.5) / divisor)
    assert gradient.tolist() == pytest.approx([-0.5 / divisor, *[0.5 / divisor] * 3])
    assert metrics["weight"] == pytest.approx(4 / divisor)


ROWS = Batch({"action_tokens": np.array([1, 3, 0])})
LOGPROBS = torch.tensor([-1.0, -2.0, -3.0, -4.0])


@pytest.mark.feature(121)
@pytest.mark.parametrize(("averaging", "expected"), [("token", 10 / 4), ("sequence", (1 + 9 / 3) / 2)])
def test_sft_by_hand(averaging, expected):
    algorithm = SFT(averaging)
    loss, _, metrics = run(algorithm, algorithm.annotate(ROWS), LOGPROBS)
    assert loss == pytest.approx(expected)
    assert metrics == {"nll": pytest.approx(expected)}


def test_sft_needs_no_reward_and_takes_any_group_size():
    SFT().check_group_size(1)
    assert SFT().annotate(ROWS).dense("weight").tolist() == [0.25, 0.25, 0]
