# SPDX-License-Identifier: Apache-2.0
"""DAPO by hand: over-long shaping, dynamic sampling, clip-higher, token mean."""

import pytest
import torch

from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.losses.columns import SampleView
from tests.support.ragged_updates import rows_of, run

NAN = float("nan")


def test_over_long_answers_lose_linearly_within_the_buffer():
    rows = rows_of([1] * 6, [0] * 6, [1, 6, 7, 8, 10, 12])
    rewards = DAPO(max_tokens=10, overlong_buffer=4).rewards(SampleView.of(rows))
    assert rewards.tolist() == [0, 0, -0.25, -0.5, -1, -1]


def test_shaping_is_part_of_the_reward_that_is_compared():
    rows = rows_of([1, 1], [1, 1], [6, 10])
    plain, shaped = DAPO(normalize="none"), DAPO(normalize="none", max_tokens=10, overlong_buffer=4)
    assert plain.annotate(rows).dense("advantage").tolist() == [0, 0]
    assert shaped.annotate(rows).dense("advantage") == pytest.approx([0.5, -0.5])
    twice = DAPO(normalize="none", max_tokens=10, overlong_buffer=4, overlong_penalty=2.0)
    assert twice.annotate(rows).dense("advantage") == pytest.approx([1, -1])


def test_there_is_more_room_upwards():
    annotated = DAPO().annotate(rows_of([1, 1], [1, 0], [2, 2]))
    zeros = torch.zeros(4)
    moved = torch.tensor([1.25, 1.3, 0.75, 0.9]).log()
    _, gradient, metrics = run(DAPO(), annotated, moved, zeros, zeros)
    assert (gradient == 0).tolist() == [False, True, True, False]
    assert metrics["clip_fraction"] == pytest.approx(0.5)
    assert annotated.dense("weight").tolist() == [0.25, 0.25]
