# SPDX-License-Identifier: Apache-2.0
"""The critic: its loss by hand, what it can fit, and where its values stand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.algorithm.losses.values import ValueLoss, shift_to_actions, shift_to_states
from dlrover.python.rl.data.batch import Batch, Ragged


def loss_of(config, scores, old, returns):
    leaf = torch.tensor(scores, requires_grad=True)
    columns = {"returns": torch.tensor(returns), "values": torch.tensor(old)}
    columns["weight"] = torch.full((len(scores),), 1 / len(scores))
    loss, metrics = config(leaf, columns)
    loss.backward()
    return loss.item(), leaf.grad.tolist(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.feature(126)
def test_the_clip_by_hand():
    """Towards the return beyond the clip, within it, and away from the return beyond the clip."""
    loss, gradient, metrics = loss_of(ValueLoss(0.2), [0.5, 0.1, -0.5], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    assert loss == pytest.approx((0.8**2 + 0.9**2 + 1.5**2) / 3 / 2)
    assert gradient == pytest.approx([0, -0.9 / 3, -1.5 / 3])
    assert metrics["value_clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["value"] == pytest.approx(0.1 / 3)
    assert metrics["value_error"] == pytest.approx((0.5**2 + 0.9**2 + 1.5**2) / 3)


@pytest.mark.feature(126)
def test_without_a_clip_it_is_half_the_squared_error():
    loss, gradient, metrics = loss_of(ValueLoss(None), [0.5, -0.5], [9.0, 9.0], [1.0, 1.0])
    assert loss == pytest.approx((0.25 + 2.25) / 2 / 2)
    assert gradient == pytest.approx([-0.25, -0.75])
    assert "value_clip_fraction" not in metrics


@pytest.mark.feature(126)
@pytest.mark.parametrize("clip", [None, 0.2])
def test_values_fit_a_constant_return(clip):
    values = torch.tensor([3.0, -2.0, 0.0])
    for _ in range(60):
        gradient = loss_of(ValueLoss(clip), values.tolist(), values.tolist(), [0.7] * 3)[1]
        values -= torch.tensor(gradient)
    assert values.tolist() == pytest.approx([0.7] * 3, abs=1e-3)


def test_a_clip_has_to_be_positive():
    with pytest.raises(ValueError, match="clip: input should be greater than 0"):
        ValueLoss(0.0)


masks = st.lists(st.lists(st.booleans(), max_size=6).map(lambda row: [False, *row][: len(row)]), max_size=5)


@given(masks)
def test_a_value_is_that_of_the_token_before_the_action(rows):
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
