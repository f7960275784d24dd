# SPDX-License-Identifier: Apache-2.0
"""Losses on pairs by hand and against a slow reference: reward model, DPO, conservative DPO, IPO."""

import math

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.losses.columns import add_pair_columns
from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch, Ragged
from tests.support.loss_updates import logprobs_for, outcome


def pairs_of(masks, chosen, pair, old=None, ref=None) -> Batch:
    mask = Ragged.from_rows(masks, dtype=np.bool_)
    total = len(mask.values)
    return Batch(
        {
            "tokens": mask.like(np.arange(total)),
            "action_mask": mask,
            "action_tokens": np.array([int(np.sum(row)) for row in masks]),
            "pair": np.array(pair),
            "chosen": np.array(chosen),
            "old_logprobs": mask.like(np.zeros(total, dtype=np.float32) if old is None else old),
            "ref_logprobs": mask.like(np.zeros(total, dtype=np.float32) if ref is None else ref),
        }
    )


def pairs_update(seed: int, pairs: int = 7) -> Batch:
    """Rows of pairs in random order; the last pair's rejected row has no action."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(2 * pairs)
    pair, chosen = np.repeat(np.arange(10, 10 + pairs), 2)[order], (np.arange(2 * pairs) % 2 == 0)[order]
    masks = []
    for number, is_chosen in zip(pair, chosen, strict=True):
        mask = np.concatenate([[False], rng.random(rng.integers(2, 9)) < 0.7, [True]])
        masks.append(mask & (is_chosen or number != 9 + pairs))
    total = sum(map(len, masks))
    old = -rng.exponential(1.0, total)
    ref = old + rng.normal(0, 0.5, total)
    return pairs_of(masks, chosen, pair, old.astype(np.float32), ref.astype(np.float32))


def slow_pair_loss(config, batch, outputs):
    """Pair by pair."""
    sums: dict[int, dict[bool, float]] = {}
    for row in map(batch.row, range(len(batch))):
        places = np.flatnonzero(row["action_mask"])
        if isinstance(config, RewardModel):
            value = sum(float(outputs[row["tokens"][at]]) for at in places)
        else:
            value = sum(float(outputs[row["tokens"][at]]) - float(row["ref_logprobs"][at]) for at in places)
        mean = isinstance(config, RewardModel) or config.token_means
        if len(places):
            sums.setdefault(int(row["pair"]), {})[bool(row["chosen"])] = value / (len(places) if mean else 1)
    losses = []
    for pair in sums.values():
        if len(pair) == 2:
            margin = pair[True] - pair[False]
            if isinstance(config, RewardModel):
                losses.append(math.log1p(math.exp(-margin)))
            elif config.kind == "ipo":
                losses.append((margin - 1 / (2 * config.beta)) ** 2)
            else:
                right, wrong = (math.log1p(math.exp(-sign * config.beta * margin)) for sign in (1, -1))
                losses.append((1 - config.label_smoothing) * right + config.label_smoothing * wrong)
    return sum(losses) / len(losses)


PAIR_CONFIGS = [
    RewardModel(),
    DPO(),
    DPO(beta=0.7, token_means=True),
    DPO(beta=0.5, label_smoothing=0.2),
    DPO(beta=0.5, kind="ipo"),
    DPO(beta=0.5, kind="ipo", token_means=True),
]


@pytest.mark.parametrize("config", PAIR_CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_pairs_loss_equals_a_slow_reference(config, seed):
    batch = pairs_update(seed)
    outputs = logprobs_for(batch, seed)
    assert outcome(config, batch, outputs).loss == pytest.approx(slow_pair_loss(config, batch, outputs), rel=1e-5)


@pytest.mark.parametrize("config", PAIR_CONFIGS)
def test_pairs_gradient_equals_the_loss_gradient(config):
    batch = pairs_update(2)
    outputs = logprobs_for(batch, 2)
    gradient = outcome(config, batch, outputs).gradient
    for at in range(0, len(outputs), 3):
        step = torch.zeros_like(outputs)
        step[at] = 1e-5
        up, down = (slow_pair_loss(config, batch, outputs + sign * step) for sign in (1, -1))
        assert gradient[at].item() == pytest.approx((up - down) / 2e-5, abs=1e-5)


ONE = pairs_of([[False, True, True], [False, True]], [True, False], [4, 4])
SLOPE = 0.1 / (1 + math.exp(0.4))
LOSS, HALF = math.log1p(math.exp(-0.4)), 0.5 / (1 + math.e)


@pytest.mark.feature(109, 110)
@pytest.mark.parametrize(
    ("algorithm", "outputs", "loss", "gradient", "figures"),
    [
        (RewardModel(), [9, 0, 3, 9, 0.5], math.log1p(math.exp(-1)), [0, -HALF, -HALF, 0, 2 * HALF], (1, 1, 1.5, 0.5)),
        (
            DPO(beta=0.1),
            [9, 1, 2, 9, -1],
            math.log1p(math.exp(-0.4)),
            [0, -SLOPE, -SLOPE, 0, SLOPE],
            (1, 0.4, 0.3, -0.1),
        ),
        (DPO(beta=0.1), [0] * 5, math.log(2), [0, -0.05, -0.05, 0, 0.05], (0.5, 0, 0, 0)),
        (DPO(beta=0.1, kind="ipo"), [0, 5, 0, 0, 0], 0, [0] * 5, (1, 0.5, 0.5, 0)),
    ],
    ids=["reward model", "dpo", "dpo at the start", "ipo at its margin"],
)
def test_pairs_loss_by_hand(algorithm, outputs, loss, gradient, figures):
    actual = outcome(algorithm, ONE, torch.tensor(outputs, dtype=torch.float32))
    metrics = dict(zip(("accuracy", "margin", "chosen", "rejected"), figures, strict=True))
    assert actual.loss == pytest.approx(loss, abs=1e-6)
    assert actual.gradient.tolist() == pytest.approx(gradient, abs=1e-6)
    assert actual.metrics == pytest.approx(metrics, abs=1e-6)


@pytest.mark.parametrize(("chosen", "pair"), [([True, True], [1, 1]), ([True, False], [1, 2]), ([True, False], [1, 3])])
def test_pairs_need_one_chosen_and_one_rejected_row(chosen, pair):
    with pytest.raises(DataError, match="one chosen and one rejected row"):
        add_pair_columns(pairs_of([[False, True]] * 2, chosen, pair))


def test_pairs_divided_over_ranks_are_refused():
    with pytest.raises(DataError, match="a pair is divided"):
        columns = {"unit": torch.tensor([3, 3]), "sign": torch.ones(2), "weight": torch.full((2,), 0.1)}
        RewardModel().loss(torch.zeros(2), columns)
