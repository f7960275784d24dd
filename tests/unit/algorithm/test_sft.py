# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning."""

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.data.batch import Batch
from tests.support.ragged_updates import random_update, run

ROWS = Batch({"action_tokens": np.array([1, 3, 0])})
LOGPROBS = torch.tensor([-1.0, -2.0, -3.0, -4.0])


@pytest.mark.feature(121)
@pytest.mark.parametrize(("averaging", "expected"), [("token", 10 / 4), ("sequence", (1 + 9 / 3) / 2)])
def test_both_averages_by_hand(averaging, expected):
    algorithm = SFT(averaging)
    loss, _, metrics = run(algorithm, algorithm.annotate(ROWS), LOGPROBS, LOGPROBS, LOGPROBS)
    assert loss == pytest.approx(expected)
    assert metrics == {"nll": pytest.approx(expected)}


@pytest.mark.feature(122)
@pytest.mark.parametrize("averaging", ["token", "sequence"])
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_change_nothing(averaging, parts):
    rows, *logprobs = random_update(2)
    annotated = SFT(averaging).annotate(rows)
    whole, split = run(SFT(averaging), annotated, *logprobs), run(SFT(averaging), annotated, *logprobs, parts=parts)
    assert split[0] == pytest.approx(whole[0])
    torch.testing.assert_close(split[1], whole[1], rtol=0, atol=0)


def test_rows_need_no_reward_and_any_group_size_will_do():
    SFT().check_group_size(1)
    annotated = SFT().annotate(ROWS)
    assert annotated.dense("weight").tolist() == [0.25, 0.25, 0]
