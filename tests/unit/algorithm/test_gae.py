# SPDX-License-Identifier: Apache-2.0
"""Generalised advantage estimation by hand, over turns, and against its recursion."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.algorithm.losses.values import gae, rewards_to_go
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.data.batch import Batch, Ragged

UNWHITENED = PPO(gamma=0.9, lam=0.8, whiten=False)
ADVANTAGES = [0.12928, 0.374, 0.7]
"""Of rewards 0, 0, 1 and values 0.5, 0.4, 0.3: the errors are -0.14, -0.13, 0.7."""


def rows_of(masks, values, rewards, **more) -> Batch:
    mask = Ragged.from_rows(masks, dtype=np.bool_)
    return Batch(
        {
            "tokens": mask.like(np.arange(len(mask.values))),
            "action_mask": mask,
            "action_tokens": np.array([int(np.sum(row)) for row in masks]),
            "prompt_id": np.arange(len(masks)),
            "reward": np.array(rewards, dtype=float),
            "values": Ragged.from_rows(values, dtype=np.float32),
            **more,
        }
    )


@pytest.mark.feature(115)
def test_three_tokens_by_hand():
    advantage, returns = gae(np.array([0.0, 0, 1]), np.array([0.5, 0.4, 0.3]), np.array([3]), 0.9, 0.8)
    assert advantage == pytest.approx(ADVANTAGES)
    assert returns == pytest.approx([0.62928, 0.774, 1.0])


@pytest.mark.feature(115)
def test_what_the_environment_says_between_is_no_step():
    rows = rows_of([[False, True, False, False, True, True]], [[99, 0.5, 99, 99, 0.4, 0.3]], [1.0])
    annotated = UNWHITENED.annotate(rows)
    assert annotated.ragged("advantage").values == pytest.approx(
        [0, ADVANTAGES[0], 0, 0, ADVANTAGES[1], ADVANTAGES[2]], abs=1e-6
    )
    assert annotated.ragged("returns").values == pytest.approx([0, 0.62928, 0, 0, 0.774, 1.0], abs=1e-6)
    assert annotated.dense("weight") == pytest.approx([1 / 3])


@pytest.mark.feature(115)
def test_a_trajectory_of_several_rows_is_one_line():
    rows = rows_of(
        [[False, True], [False, False, True, True]],
        [[9, 0.5], [9, 9, 0.4, 0.3]],
        [0.0, 1.0],
        trajectory=np.array([6, 6]),
    )
    advantage = UNWHITENED.annotate(rows).ragged("advantage")
    assert advantage[0] == pytest.approx([0, ADVANTAGES[0]], abs=1e-6)
    assert advantage[1] == pytest.approx([0, 0, ADVANTAGES[1], ADVANTAGES[2]], abs=1e-6)


def test_rewards_of_tokens_come_before_that_of_the_row():
    rows = rows_of(
        [[False, True, True]], [[0, 0, 0]], [5.0], token_rewards=Ragged.from_rows([[7, 1, 2]], dtype=np.float32)
    )
    assert PPO(gamma=1.0, lam=1.0, whiten=False).annotate(rows).ragged("returns").values.tolist() == [0, 3, 2]


def test_a_failed_sample_counts_nowhere():
    rows = rows_of([[False, True], [False, True]], [[0, 0.5], [0, 0.5]], [1.0, float("nan")])
    annotated = UNWHITENED.annotate(rows)
    assert annotated.ragged("advantage").values == pytest.approx([0, 0.5, 0, 0])
    assert annotated.dense("weight").tolist() == [1, 0]


def slow(reward, value, gamma, lam):
    """The sum of eq. 16 instead of its recursion."""
    value = [*value, 0.0]
    errors = [reward[t] + gamma * value[t + 1] - value[t] for t in range(len(reward))]
    return [sum((gamma * lam) ** (s - t) * errors[s] for s in range(t, len(reward))) for t in range(len(reward))]


numbers = st.floats(-5, 5)
samples = st.lists(st.lists(st.tuples(numbers, numbers), max_size=6), max_size=5)


@given(samples, st.floats(0, 1), st.floats(0, 1))
def test_ragged_samples_are_each_their_own(table, gamma, lam):
    flat = [pair for sample in table for pair in sample]
    reward, value = (np.array([pair[side] for pair in flat], dtype=float) for side in (0, 1))
    lengths = np.array([len(sample) for sample in table], dtype=np.int64)
    advantage, returns = gae(reward, value, lengths, gamma, lam)
    wanted = [one for sample in table for one in slow([p[0] for p in sample], [p[1] for p in sample], gamma, lam)]
    assert advantage == pytest.approx(wanted, abs=1e-9)
    assert returns == pytest.approx(advantage + value)
    assert rewards_to_go(reward, lengths) == pytest.approx(
        [sum(p[0] for p in sample[t:]) for sample in table for t in range(len(sample))], abs=1e-9
    )
