# SPDX-License-Identifier: Apache-2.0
"""Losses and advantages against verl's and TRL's unchanged ones, where they define the same thing.

Known to differ: the standard deviation of a group is verl's and TRL's unbiased one, and here the population's; so
their GRPO advantages are smaller by ``sqrt((n - 1) / n)``.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_pairs import pairs_update

from dlrover.python.rl.algorithm.cispo import CISPO
from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.distillation import reverse_kl
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.dr_grpo import DrGRPO
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.gspo import GSPO
from dlrover.python.rl.algorithm.losses.policy_gradient import correction_weights, kl_estimate
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.algorithm.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from dlrover.python.rl.algorithm.rloo import RLOO
from dlrover.python.rl.data.batch import Ragged
from tests.support.loss_updates import logprobs_for, outcome, ragged_update

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def peer(module):
    """A module of a peer, or a skip that says what is missing."""
    return pytest.importorskip(module, reason=f"{module} cannot be imported here", exc_type=ImportError)


@pytest.fixture(params=range(3))
def seed(request):
    return request.param


@pytest.fixture
def batch(seed):
    """All rows count; every group has samples to compare."""
    batch = ragged_update(seed)
    counted = (batch.dense("action_tokens") > 0) & ~np.isnan(batch.dense("reward"))
    batch = batch.take(np.flatnonzero(counted).tolist())
    tokens = batch.ragged("tokens")
    return batch.with_columns(tokens=tokens.like(np.arange(len(tokens.values))))


def padded(column, dtype=torch.float64):
    """A ragged column, or flat values of one, as ``[rows, longest]``."""
    longest = int(column.lengths.max())
    return torch.tensor([[*row.tolist(), *[0] * (longest - len(row))] for row in column], dtype=dtype)


def grid(batch, flat):
    """Values of all tokens as ``[rows, longest]``."""
    return padded(batch.ragged("tokens").like(flat.numpy()))


def peers_view(batch):
    """Mask, rewards on the last action, and the prompts of the groups."""
    mask = padded(batch.ragged("action_mask"))
    rewards = torch.zeros_like(mask)
    for row, (reward, chosen) in enumerate(zip(batch.dense("reward"), mask, strict=True)):
        rewards[row, int(chosen.nonzero()[-1])] = reward
    return mask, rewards, batch.dense("prompt_id")


def tokens_advantages(annotated):
    """``[rows, longest]``, 0 outside the mask."""
    mask, column = padded(annotated.ragged("action_mask")), annotated["advantage"]
    if isinstance(column, Ragged):
        return padded(column) * mask
    return torch.from_numpy(column.astype(np.float64))[:, None] * mask


def assert_equal(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# -- verl -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl():
    return peer("verl.trainer.ppo.core_algos")


def test_verl_gae(verl, batch):
    mask, rewards, _ = peers_view(batch)
    expected, returns = verl.compute_gae_advantage_return(rewards, padded(batch.ragged("values")), mask, 0.9, 0.8)
    annotated = PPO(gamma=0.9, lam=0.8).annotate(batch)
    assert_equal(tokens_advantages(annotated), expected * mask)
    assert_equal(padded(annotated.ragged("returns")) * mask, returns * mask)


def test_verl_group_advantages(verl, batch):
    mask, rewards, index = peers_view(batch)
    expected, _ = verl.compute_grpo_outcome_advantage(rewards, mask, index)
    sizes = torch.tensor([(index == prompt).sum() for prompt in index], dtype=torch.float64)
    factor = (sizes / (sizes - 1)).sqrt()[:, None]
    assert_equal(tokens_advantages(GRPO().annotate(batch)), expected * factor, 1e-4)
    expected, _ = verl.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    assert_equal(tokens_advantages(DrGRPO().annotate(batch)), expected)


def test_verl_reinforce(verl, batch):
    mask, rewards, index = peers_view(batch)
    expected, _ = verl.compute_rloo_outcome_advantage(rewards, mask, index)
    assert_equal(tokens_advantages(RLOO().annotate(batch)), expected)
    config = SimpleNamespace(gamma=0.9)
    expected, _ = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
    assert_equal(tokens_advantages(ReinforcePlusPlus(gamma=0.9).annotate(batch)), expected)
    expected, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)
    assert_equal(tokens_advantages(ReinforcePlusPlusBaseline().annotate(batch)), expected)


def verl_config(**options):
    config = peer("verl.workers.config")
    return config.FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)


MODES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "sum": "seq-mean-token-sum"}
SURROGATES = {
    "vanilla": DAPO(clip_low=0.1, clip_high=0.15, dual_clip=1.2),
    "vanilla, sequences": GRPO(clip_low=0.1, clip_high=0.15, dual_clip=1.2, normalize="none"),
    "vanilla, sums": RLOO(clip_low=0.1, clip_high=0.15, dual_clip=1.2),
    "gspo": GSPO(clip_low=0.05, clip_high=0.1),
    "cispo": CISPO(clip_low=0.1, clip_high=0.15),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_verl_policy_losses(verl, name, seed, batch):
    config = SURROGATES[name]
    mask, *_ = peers_view(batch)
    current = logprobs_for(batch, seed)
    leaf = grid(batch, current).requires_grad_()
    options = {"clip_ratio_low": config.clip_low, "clip_ratio_high": config.clip_high}
    options |= {"clip_ratio_c": config.dual_clip} if config.dual_clip else {}
    old, advantages = padded(batch.ragged("old_logprobs")), tokens_advantages(config.annotate(batch))
    loss = verl.get_policy_loss_fn(name.split(",")[0])
    expected, _ = loss(old, leaf, advantages, mask, MODES[config.averaging], verl_config(**options))
    expected.backward()
    actual = outcome(config, batch, current)
    assert actual.loss == pytest.approx(expected.item(), rel=1e-5)
    assert_equal(grid(batch, actual.gradient), leaf.grad)


def test_verl_value_loss(verl, seed, batch):
    annotated = PPO().annotate(batch)
    scores = logprobs_for(batch, seed)
    returns, values, mask = map(padded, (annotated["returns"], batch["values"], batch["action_mask"]))
    expected, fraction = verl.compute_value_loss(grid(batch, scores), returns, values, mask, 0.2)
    actual = outcome(PPO(), batch, scores, loss=PPO().value_loss)
    assert actual.loss == pytest.approx(expected.item(), rel=1e-5)
    assert actual.metrics["value_clip_fraction"] == pytest.approx(fraction.item(), abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_verl_kl(verl, kind):
    first, second = -torch.rand(2, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_equal(kl_estimate(first, second, kind), verl.kl_penalty(first, second, kind))


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_verl_correction(level, kind, batch):
    helper = peer("verl.trainer.ppo.rollout_corr_helper")
    mask, *_ = peers_view(batch)
    log_ratio = (padded(batch.ragged("old_logprobs")) - padded(batch.ragged("rollout_logprobs"))) * mask
    threshold = 1.3 if kind == "truncate" else "0.8_1.3"
    expected, _ = helper.compute_rollout_correction_weights(log_ratio, mask, level, threshold)
    rows, places = mask.nonzero(as_tuple=True)
    old = log_ratio[rows, places]
    columns = {"old_logprobs": old, "rollout_logprobs": torch.zeros_like(old), "weight": torch.ones_like(old)}
    columns["unit"] = rows
    actual, _ = correction_weights(columns, kind, level, 0.8, 1.3)
    assert_equal(actual, expected[rows, places])


# -- TRL --------------------------------------------------------------------------------------------------------------


class Trainer(SimpleNamespace):
    """Has what the losses of TRL's trainers look at."""

    def __init__(self, **attributes):
        same = SimpleNamespace(num_processes=1, device="cpu", reduce=lambda values, reduction: values)
        same.gather = same.gather_for_metrics = lambda values: values
        model = SimpleNamespace(training=True)
        metrics = {"train": defaultdict(list)}
        super().__init__(accelerator=same, model=model, _metrics=metrics, aux_loss_enabled=False, **attributes)


TRL_GRPO = {
    "grpo": ("token", 0.3, GRPO(clip_low=0.1, clip_high=0.15, kl_coef=0.3)),
    "dapo": ("token", 0.0, DAPO(clip_low=0.1, clip_high=0.15)),
    "bnpo": ("token", 0.3, DrGRPO(clip_low=0.1, clip_high=0.15, kl_coef=0.3)),
    "dr_grpo": ("token", 0.0, DrGRPO(clip_low=0.1, clip_high=0.15, averaging="constant", max_tokens=9)),
    "grpo, sequences": ("sequence", 0.0, GSPO(clip_low=0.05, clip_high=0.1)),
    "cispo": ("token", 0.0, CISPO(clip_high=0.15)),
}


@pytest.mark.parametrize("name", TRL_GRPO)
def test_trl_grpo_losses(name, seed, batch):
    trainer = peer("trl.trainer.grpo_trainer").GRPOTrainer
    level, beta, config = TRL_GRPO[name]
    mask, *_ = peers_view(batch)
    current, entropies = logprobs_for(batch, seed), torch.zeros_like(mask)
    leaf = grid(batch, current).requires_grad_()
    kind = name.split(",")[0]
    high = 1 + config.clip_high if kind == "cispo" else config.clip_high
    named = {"importance_sampling_level": level, "beta": beta, "loss_type": kind, "epsilon_low": config.clip_low}
    counts = {"top_entropy_quantile": 1.0, "current_gradient_accumulation_steps": 1, "max_completion_length": 9}
    unused = {"off_policy_mask_threshold": None, "use_vllm": False, "_entropy_bonus_enabled": False}
    state = Trainer(**named, epsilon_high=high, **counts, **unused)
    state.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    state._get_per_token_logps_and_entropies = lambda *_args, **_kwargs: (leaf, entropies, None)
    rows = dict.fromkeys(("prompt_ids", "prompt_mask"), torch.zeros((len(batch), 0), dtype=torch.int64))
    rows |= {"completion_ids": mask.long(), "completion_mask": mask, "num_items_in_batch": mask.sum()}
    rows |= {f"{name}_per_token_logps": padded(batch.ragged(f"{name}_logprobs")) for name in ("old", "ref")}
    expected = trainer._compute_loss(state, None, rows | {"advantages": tokens_advantages(config.annotate(batch))})
    expected.backward()
    actual = outcome(config, batch, current)
    assert actual.loss == pytest.approx(expected.item(), rel=1e-5)
    assert_equal(grid(batch, actual.gradient), leaf.grad)


TRL_DPO = {
    "sigmoid": DPO(beta=0.3),
    "sigmoid_norm": DPO(beta=0.3, token_means=True),
    "ipo": DPO(beta=0.3, kind="ipo", token_means=True),
}


@pytest.mark.parametrize("name", TRL_DPO)
def test_trl_dpo_losses(name, seed):
    trainer = peer("trl.trainer.dpo_trainer").DPOTrainer
    config, batch = TRL_DPO[name], pairs_update(seed)
    whole = [pair for pair in np.unique(batch.dense("pair")) if pair != batch.dense("pair").max()]
    order = [
        int(np.flatnonzero((batch.dense("pair") == pair) & (batch.dense("chosen") == chosen))[0])
        for chosen in (True, False)
        for pair in whole
    ]
    current = logprobs_for(batch, seed)
    rows = batch.take(order)
    mask = padded(rows.ragged("action_mask"))
    places = rows.ragged("tokens")
    now = padded(places.like(current.numpy()[places.values])).requires_grad_()
    reference = (padded(rows.ragged("ref_logprobs")) * mask).sum(dim=1)

    def model(**_kwargs):
        zeros = torch.zeros_like(mask)
        # TRL's first token has no log-prob, as here.
        values = (now * mask)[:, 1:]
        same = {name: zeros[:, 1:] for name in ("entropy", "mean_logits")}
        return SimpleNamespace(log_probs=values, is_top1=zeros[:, 1:].bool(), **same)

    model.training = True
    losses = {"loss_types": [name], "loss_weights": [1.0], "beta": config.beta, "f_divergence_type": "reverse_kl"}
    unused = {"ld_alpha": None, "use_weighting": False, "label_smoothing": 0.0, "_total_train_tokens": 0, "_tp_size": 1}
    state, half = Trainer(precompute_ref_logps=True, **losses, **unused), len(whole)
    inputs = dict.fromkeys(("input_ids", "completion_mask"), mask.long())
    inputs |= {"attention_mask": torch.ones_like(mask).long()}
    inputs |= {"ref_chosen_logps": reference[:half], "ref_rejected_logps": reference[half:]}
    expected = trainer._compute_loss(state, model, inputs, return_outputs=False)
    expected.backward()
    actual = outcome(config, batch, current)
    assert actual.loss == pytest.approx(expected.item(), rel=1e-5)
    slopes = padded(places.like(actual.gradient.numpy()[places.values]))
    assert_equal(slopes, now.grad)
    if not config.token_means:  # TRL's are sums in any case.
        assert actual.metrics["margin"] == pytest.approx(state._metrics["train"]["rewards/margins"][0], rel=1e-5)


def test_trl_reverse_kl_over_the_vocabulary(seed):
    jsd = peer("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    student, teacher = torch.randn(2, 1, 6, 13, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    student.requires_grad_()
    expected = jsd(student, teacher, beta=1, reduction="sum")
    (slope,) = torch.autograd.grad(expected, student)
    values, ids = teacher.log_softmax(-1).topk(13)
    actual = reverse_kl(student.log_softmax(-1).gather(-1, ids), values).sum()
    assert_equal(actual, expected)
    assert_equal(torch.autograd.grad(actual, student)[0], slope)
