# SPDX-License-Identifier: Apache-2.0
"""The critic's loss and where its values stand; generalised advantage estimation by hand and against its recursion."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.algorithm.losses.values import ValueLoss, gae, rewards_to_go, shift_to_actions, shift_to_states
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.data.batch import Batch, Ragged
from tests.support.loss_updates import token_rows


def value_loss_of(config, scores, old, returns):
    leaf = torch.tensor(scores, requires_grad=True)
    columns = {"returns": torch.tensor(returns), "values": torch.tensor(old)}
    columns["weight"] = torch.full((len(scores),), 1 / len(scores))
    loss, metrics = config(leaf, columns)
    loss.backward()
    return loss.item(), leaf.grad.tolist(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.feature(126)
def test_value_loss_with_a_clip_by_hand():
    """Towards the return beyond the clip, within it, and away from the return beyond the clip."""
    loss, gradient, metrics = value_loss_of(ValueLoss(0.2), [0.5, 0.1, -0.5], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    assert loss == pytest.approx((0.8**2 + 0.9**2 + 1.5**2) / 3 / 2)
    assert gradient == pytest.approx([0, -0.9 / 3, -1.5 / 3])
    assert metrics["value_clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["value"] == pytest.approx(0.1 / 3)
    assert metrics["value_error"] == pytest.approx((0.5**2 + 0.9**2 + 1.5**2) / 3)


@pytest.mark.feature(126)
def test_value_loss_without_a_clip_is_half_the_squared_error():
    loss, gradient, metrics = value_loss_of(ValueLoss(None), [0.5, -0.5], [9.0, 9.0], [1.0, 1.0])
    assert loss == pytest.approx((0.25 + 2.25) / 2 / 2)
    assert gradient == pytest.approx([-0.25, -0.75])
    assert "value_clip_fraction" not in metrics


@pytest.mark.feature(126)
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_fits_a_constant_return(clip):
    values = torch.tensor([3.0, -2.0, 0.0])
    for _ in range(60):
        gradient = value_loss_of(ValueLoss(clip), values.tolist(), values.tolist(), [0.7] * 3)[1]
        values -= torch.tensor(gradient)
    assert values.tolist() == pytest.approx([0.7] * 3, abs=1e-3)


def test_value_loss_needs_a_positive_clip():
    with pytest.raises(ValueError, match="clip: input should be greater than 0"):
        ValueLoss(0.0)


masks = st.lists(st.lists(st.booleans(), max_size=6).map(lambda row: [False, *row][: len(row)]), max_size=5)


@given(masks)
def test_shift_to_states_moves_values_before_their_actions(rows):
    mask = Ragged.from_rows(rows, dtype=np.bool_)
    tokens = mask.like(np.arange(100, 100 + len(mask.values)))
    columns = {"returns": mask.like(tokens.values * 2.0), "weight": np.arange(len(rows))}
    moved = shift_to_states(Batch({"tokens": tokens, "action_mask": mask, **columns}))
    chosen = np.flatnonzero(moved.ragged("action_mask").values)
    actions = np.flatnonzero(mask.values)
    assert chosen.tolist() == (actions - 1).tolist()
    assert moved.ragged("returns").values[chosen].tolist() == (tokens.values[actions] * 2).tolist()
    assert moved.ragged("tokens") is tokens
    assert moved.dense("weight").tolist() == list(range(len(rows)))
    back = shift_to_actions(tokens)
    assert (back.values[actions] + 1).tolist() == tokens.values[actions].tolist()
    assert all(row[0] == 0 for row in back if len(row))


UNWHITENED = PPO(gamma=0.9, lam=0.8, whiten=False)
ADVANTAGES = [0.12928, 0.374, 0.7]
"""Of rewards 0, 0, 1 and values 0.5, 0.4, 0.3: the errors are -0.14, -0.13, 0.7."""


@pytest.mark.feature(115)
def test_gae_by_hand():
    advantage, returns = gae(np.array([0.0, 0, 1]), np.array([0.5, 0.4, 0.3]), np.array([3]), 0.9, 0.8)
    assert advantage == pytest.approx(ADVANTAGES)
    assert returns == pytest.approx([0.62928, 0.774, 1.0])


@pytest.mark.feature(115)
def test_gae_skips_tokens_of_the_environment():
    rows = token_rows([[False, True, False, False, True, True]], [[99, 0.5, 99, 99, 0.4, 0.3]], [1.0])
    annotated = UNWHITENED.annotate(rows)
    assert annotated.ragged("advantage").values == pytest.approx(
        [0, ADVANTAGES[0], 0, 0, ADVANTAGES[1], ADVANTAGES[2]], abs=1e-6
    )
    assert annotated.ragged("returns").values == pytest.approx([0, 0.62928, 0, 0, 0.774, 1.0], abs=1e-6)
    assert annotated.dense("weight") == pytest.approx([1 / 3])


@pytest.mark.feature(115)
def test_gae_runs_over_all_rows_of_a_trajectory():
    rows = token_rows(
        [[False, True], [False, False, True, True]],
        [[9, 0.5], [9, 9, 0.4, 0.3]],
        [0.0, 1.0],
        trajectory=np.array([6, 6]),
    )
    advantage = UNWHITENED.annotate(rows).ragged("advantage")
    assert advantage[0] == pytest.approx([0, ADVANTAGES[0]], abs=1e-6)
    assert advantage[1] == pytest.approx([0, 0, ADVANTAGES[1], ADVANTAGES[2]], abs=1e-6)


def test_token_rewards_replace_the_reward_of_the_row():
    rows = token_rows(
        [[False, True, True]], [[0, 0, 0]], [5.0], token_rewards=Ragged.from_rows([[7, 1, 2]], dtype=np.float32)
    )
    assert PPO(gamma=1.0, lam=1.0, whiten=False).annotate(rows).ragged("returns").values.tolist() == [0, 3, 2]


def test_gae_skips_failed_samples():
    rows = token_rows([[False, True], [False, True]], [[0, 0.5], [0, 0.5]], [1.0, float("nan")])
    annotated = UNWHITENED.annotate(rows)
    assert annotated.ragged("advantage").values == pytest.approx([0, 0.5, 0, 0])
    assert annotated.dense("weight").tolist() == [1, 0]


def slow_gae(reward, value, gamma, lam):
    """The sum of eq. 16 instead of its recursion."""
    value = [*value, 0.0]
    errors = [reward[t] + gamma * value[t + 1] - value[t] for t in range(len(reward))]
    return [sum((gamma * lam) ** (s - t) * errors[s] for s in range(t, len(reward))) for t in range(len(reward))]


numbers = st.floats(-5, 5)
samples = st.lists(st.lists(st.tuples(numbers, numbers), max_size=6), max_size=5)


@given(samples, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_a_slow_reference_on_each_sample(table, gamma, lam):
    flat = [pair for sample in table for pair in sample]
    reward, value = (np.array([pair[side] for pair in flat], dtype=float) for side in (0, 1))
    lengths = np.array([len(sample) for sample in table], dtype=np.int64)
    advantage, returns = gae(reward, value, lengths, gamma, lam)
    expected = [value for sample in table if sample for value in slow_gae(*zip(*sample, strict=True), gamma, lam)]
    assert advantage == pytest.approx(expected, abs=1e-9)
    assert returns == pytest.approx(advantage + value)
    assert rewards_to_go(reward, lengths) == pytest.approx(
        [sum(p[0] for p in sample[t:]) for sample in table for t in range(len(sample))], abs=1e-9
    )
