# SPDX-License-Identifier: Apache-2.0
"""Columns of losses: advantages of groups, weights, samples, whitening, the critic's values and GAE."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.columns import SampleView, group_advantages, token_weights, whiten
from dlrover.python.rl.algorithm.losses.values import ValueLoss, gae, shift_to_actions, shift_to_states
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.algorithm.reinforce import ReinforcePlusPlus
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch, Ragged
from tests.support.loss_updates import rows_of, token_rows

NAN = float("nan")
ALL = np.ones(2, dtype=bool)
LENGTHS = np.array([1, 3])


def advantages(prompt_id, reward, normalize="std"):
    return group_advantages(np.array(prompt_id), np.array(reward, dtype=float), normalize)


@pytest.mark.feature(112, 113)
@pytest.mark.parametrize(
    ("prompt_id", "reward", "normalize", "expected"),
    [
        ([1, 1, 2, 2], [10, 12, 0, 1], "std", [-1, 1, -1, 1]),
        ([1, 2, 1, 2], [10, 0, 12, 1], "none", [-1, -0.5, 1, 0.5]),
        ([5, 5, 5], [0.1, 0.1, 0.1], "std", [0, 0, 0]),
        ([5], [3.0], "std", [0]),
        ([1, 1, 1, 2], [1, NAN, 0, NAN], "none", [0.5, 0, -0.5, 0]),
        ([], [], "std", []),
    ],
)
def test_group_advantages_by_hand(prompt_id, reward, normalize, expected):
    assert advantages(prompt_id, reward, normalize) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advantages([1], [1.0], "sd"), "unknown normalize 'sd'"),
        (lambda: advantages([1, 1], [1.0, np.inf]), r"infinite rewards in rows \[1\]"),
        (lambda: token_weights(LENGTHS, ALL, "tokens"), "unknown averaging 'tokens'; did you mean 'token'"),
        (lambda: token_weights(LENGTHS, ALL, "constant"), "divides by max_tokens"),
    ],
)
def test_columns_refuse_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.feature(121)
@pytest.mark.parametrize(
    ("mode", "expected"), [("token", [1 / 4, 1 / 4]), ("sequence", [1 / 2, 1 / 6]), ("constant", [1 / 20, 1 / 20])]
)
def test_token_weights_by_hand(mode, expected):
    weights = token_weights(LENGTHS, ALL, mode, max_tokens=10)
    assert weights == pytest.approx(expected)
    assert weights.dtype == np.float32


@pytest.mark.parametrize("averaging", ["token", "sequence"])
def test_masked_sample_has_a_reward_but_no_weight(averaging):
    rows = rows_of([1, 1, 1, 1], [1, 3, 0, 0], [1, 3, 2, 5]).with_columns(trajectory=np.array([0, 1, 2, 2]))
    algorithm = GRPO(normalize="none", averaging=averaging)
    masked = algorithm.annotate(rows.with_columns(masked=np.array([False, False, True, False])))
    assert masked.dense("advantage").tolist() == algorithm.annotate(rows).dense("advantage").tolist()
    alone = algorithm.annotate(rows_of([1, 1], [1, 3], [1, 3])).dense("weight").tolist()
    assert masked.dense("weight").tolist() == [*alone, 0, 0]


def test_sample_view_finds_scattered_rows():
    rows = rows_of([4, 8, 4], [1, 2, 3], [1, 1, 1]).with_columns(trajectory=np.array([7, 2, 7]))
    view = SampleView.of(rows)
    columns = (view.of_row, view.reward, view.prompt_id, view.action_tokens)
    assert [column.tolist() for column in columns] == [[1, 0, 1], [2, 4], [8, 4], [1, 2]]


def test_mask_with_other_numbers_of_actions_is_refused():
    rows = rows_of([1], [1], [1]).with_columns(action_mask=Ragged.from_rows([[False, True, True]], dtype=np.bool_))
    with pytest.raises(DataError, match="differ from the token counts"):
        ReinforcePlusPlus().annotate(rows)


@pytest.mark.parametrize("values", [[], [5.0], [0.1, 0.1, 0.1]])
def test_whiten_gives_0_for_equal_numbers(values):
    assert whiten(np.array(values)).tolist() == [0] * len(values)


def value_loss_of(config, scores, old, returns):
    leaf = torch.tensor(scores, requires_grad=True)
    columns = {"returns": torch.tensor(returns), "values": torch.tensor(old)}
    columns["weight"] = torch.full((len(scores),), 1 / len(scores))
    loss, metrics = config(leaf, columns)
    loss.backward()
    return loss.item(), leaf.grad.tolist(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.feature(126)
def test_value_loss_by_hand():
    loss, gradient, metrics = value_loss_of(ValueLoss(0.2), [0.5, 0.1, -0.5], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    assert loss == pytest.approx((0.8**2 + 0.9**2 + 1.5**2) / 3 / 2)
    assert gradient == pytest.approx([0, -0.9 / 3, -1.5 / 3])
    expected = {"value_clip_fraction": 1 / 3, "value": 0.1 / 3, "value_error": (0.5**2 + 0.9**2 + 1.5**2) / 3}
    assert metrics == pytest.approx(expected)
    loss, gradient, metrics = value_loss_of(ValueLoss(None), [0.5, -0.5], [9.0, 9.0], [1.0, 1.0])
    assert loss == pytest.approx((0.25 + 2.25) / 2 / 2)
    assert gradient == pytest.approx([-0.25, -0.75])
    assert "value_clip_fraction" not in metrics


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


@pytest.mark.feature(115)
def test_gae_by_hand():
    advantage, returns = gae(np.array([0.0, 0, 1]), np.array([0.5, 0.4, 0.3]), np.array([3]), 0.9, 0.8)
    assert advantage == pytest.approx([0.12928, 0.374, 0.7])
    assert returns == pytest.approx([0.62928, 0.774, 1.0])


def test_token_rewards_replace_the_reward_of_the_row():
    token_rewards = Ragged.from_rows([[7, 1, 2]], dtype=np.float32)
    rows = token_rows([[False, True, True]], [[0, 0, 0]], [5.0], token_rewards=token_rewards)
    assert PPO(gamma=1.0, lam=1.0, whiten=False).annotate(rows).ragged("returns").values.tolist() == [0, 3, 2]
