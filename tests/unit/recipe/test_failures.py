"""Samples that the reward function failed on."""

import numpy as np
import pytest

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.config import RewardConfig
from dlrover.python.rl.recipe.failures import failed_groups, failure_metrics, trainable

NAN = float("nan")


def scored(*draws):
    """Rows of (prompt id, attempt, rewards)."""
    rows = [(prompt, attempt, reward) for prompt, attempt, rewards in draws for reward in rewards]
    return Batch(
        {
            "prompt_id": np.array([row[0] for row in rows]),
            "attempt": np.array([row[1] for row in rows]),
            "reward": np.array([row[2] for row in rows]),
            "action_tokens": np.ones(len(rows), dtype=np.int64),
            "error": ["it broke" if np.isnan(row[2]) else None for row in rows],
        }
    )


def rewards(batch):
    return [None if np.isnan(value) else value for value in batch.dense("reward").tolist()]


def config(on_failure):
    return RewardConfig(on_failure=on_failure)


TWO_GROUPS = scored((4, 0, [1.0, NAN]), (9, 0, [0.0, 1.0]))


def test_a_failed_sample_alone_is_left_out():
    rows = trainable(1, TWO_GROUPS, config("drop_sample"))
    assert rewards(rows) == [1.0, None, 0.0, 1.0]
    assert failure_metrics(TWO_GROUPS, rows) == {"failed_samples": 1, "redrawn_samples": 0, "dropped_groups": 0}


def test_a_failed_samples_whole_group_is_left_out():
    rows = trainable(1, TWO_GROUPS, config("drop_group"))
    assert rewards(rows) == [None, None, 0.0, 1.0]
    assert failure_metrics(TWO_GROUPS, rows) == {"failed_samples": 1, "redrawn_samples": 0, "dropped_groups": 1}


def test_a_redrawn_group_takes_the_failed_ones_place():
    drawn = Batch.concat([TWO_GROUPS, scored((4, 1, [0.0, 0.5]))])
    rows = trainable(1, drawn, config("redraw"))
    assert rewards(rows) == [None, None, 0.0, 1.0, 0.0, 0.5]
    assert failure_metrics(drawn, rows) == {"failed_samples": 1, "redrawn_samples": 2, "dropped_groups": 0}


def test_a_group_that_fails_again_is_left_out():
    drawn = Batch.concat([TWO_GROUPS, scored((4, 1, [NAN, 0.5]))])
    rows = trainable(1, drawn, config("redraw"))
    assert rewards(rows) == [None, None, 0.0, 1.0, None, None]
    assert failure_metrics(drawn, rows) == {"failed_samples": 2, "redrawn_samples": 2, "dropped_groups": 1}


def test_only_the_last_draw_decides_what_is_drawn_again():
    assert failed_groups(TWO_GROUPS).tolist() == [4]
    assert failed_groups(Batch.concat([TWO_GROUPS, scored((4, 1, [0.0, 0.5]))])).tolist() == []
    assert failed_groups(Batch.concat([TWO_GROUPS, scored((4, 1, [NAN, 0.5]))])).tolist() == [4]


def test_a_failure_is_never_a_reward_of_zero():
    for on_failure in ("drop_sample", "drop_group", "redraw"):
        assert 0.0 not in rewards(trainable(1, scored((1, 0, [NAN, NAN]), (2, 0, [1.0, 1.0])), config(on_failure)))


def test_a_failed_sample_of_three_rows_is_one_failed_sample():
    rows = scored((4, 1, [NAN, NAN, NAN, 1.0]), (9, 0, [0.0, 1.0])).with_columns(
        trajectory=np.array([0, 0, 0, 1, 2, 3])
    )
    told = failure_metrics(rows, trainable(1, rows, config("drop_sample")))
    assert told == {"failed_samples": 1, "redrawn_samples": 2, "dropped_groups": 0}
    with pytest.raises(DataError, match="failed on all 1 samples"):
        trainable(1, rows.rows(0, 3), config("drop_sample"))


def test_failures_count_where_their_groups_were_filtered_out():
    told = failure_metrics(TWO_GROUPS, trainable(1, TWO_GROUPS.rows(2, 4), config("drop_group")))
    assert told == {"failed_samples": 1, "redrawn_samples": 0, "dropped_groups": 0}


def test_a_step_with_nothing_left_to_train_on_is_an_error():
    with pytest.raises(DataError, match="step 7: the reward function failed on all 2 samples, last with: it broke"):
        trainable(7, scored((1, 0, [NAN, NAN])), config("drop_sample"))
    with pytest.raises(DataError, match="step 7: .* failed on 2 of 4 samples, which are in each of the 2 groups"):
        trainable(7, scored((1, 0, [NAN, 1.0]), (2, 0, [NAN, 1.0])), config("drop_group"))
