# SPDX-License-Identifier: Apache-2.0
"""Samples that the reward function failed on."""

import numpy as np
import pytest

from dlrover.python.rl.common.errors import DataError, EngineError, InvocationError, NonFiniteUpdate
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.recipe.base.config import RewardConfig
from dlrover.python.rl.recipe.base.updates import annotate_errors_with_samples, find_nonfinite_rows
from dlrover.python.rl.recipe.reporting.rewards import RewardFailures, failure_metrics, find_failed_groups, mask_rewards
from dlrover.python.rl.trainer.steps import dump_state, load_state

NAN = float("nan")


def scored(*draws):
    """Rows of (prompt id, retry, rewards)."""
    rows = [(prompt, retry, reward) for prompt, retry, rewards in draws for reward in rewards]
    return Batch(
        {
            "prompt_id": np.array([row[0] for row in rows]),
            "retry": np.array([row[1] for row in rows]),
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
    rows = mask_rewards(TWO_GROUPS, config("drop_sample"))
    assert rewards(rows) == [1.0, None, 0.0, 1.0]
    assert failure_metrics(TWO_GROUPS, rows) == {"samples/failed": 1, "samples/redrawn": 0, "groups/dropped": 0}


def test_a_failed_samples_whole_group_is_left_out():
    rows = mask_rewards(TWO_GROUPS, config("drop_group"))
    assert rewards(rows) == [None, None, 0.0, 1.0]
    assert failure_metrics(TWO_GROUPS, rows) == {"samples/failed": 1, "samples/redrawn": 0, "groups/dropped": 1}


def test_a_redrawn_group_takes_the_failed_ones_place():
    batch = Batch.concat([TWO_GROUPS, scored((4, 1, [0.0, 0.5]))])
    rows = mask_rewards(batch, config("redraw"))
    assert rewards(rows) == [None, None, 0.0, 1.0, 0.0, 0.5]
    assert failure_metrics(batch, rows) == {"samples/failed": 1, "samples/redrawn": 2, "groups/dropped": 0}


def test_a_group_that_fails_again_is_left_out():
    batch = Batch.concat([TWO_GROUPS, scored((4, 1, [NAN, 0.5]))])
    rows = mask_rewards(batch, config("redraw"))
    assert rewards(rows) == [None, None, 0.0, 1.0, None, None]
    assert failure_metrics(batch, rows) == {"samples/failed": 2, "samples/redrawn": 2, "groups/dropped": 1}


def test_only_the_last_draw_decides_what_is_drawn_again():
    assert find_failed_groups(TWO_GROUPS).tolist() == [4]
    assert find_failed_groups(Batch.concat([TWO_GROUPS, scored((4, 1, [0.0, 0.5]))])).tolist() == []
    assert find_failed_groups(Batch.concat([TWO_GROUPS, scored((4, 1, [NAN, 0.5]))])).tolist() == [4]


def test_a_failure_is_never_a_reward_of_zero():
    for on_failure in ("drop_sample", "drop_group", "redraw"):
        assert 0.0 not in rewards(mask_rewards(scored((1, 0, [NAN, NAN]), (2, 0, [1.0, 1.0])), config(on_failure)))


def test_a_failed_sample_of_three_rows_is_one_failed_sample():
    rows = scored((4, 1, [NAN, NAN, NAN, 1.0]), (9, 0, [0.0, 1.0])).with_columns(
        trajectory=np.array([0, 0, 0, 1, 2, 3])
    )
    metrics = failure_metrics(rows, mask_rewards(rows, config("drop_sample")))
    assert metrics == {"samples/failed": 1, "samples/redrawn": 2, "groups/dropped": 0}
    with pytest.raises(DataError, match="failed on all 1 samples"):
        RewardFailures(config("drop_sample")).update(1, rows.rows(0, 3))


def test_failures_count_where_their_groups_were_filtered_out():
    metrics = failure_metrics(TWO_GROUPS, mask_rewards(TWO_GROUPS.rows(2, 4), config("drop_group")))
    assert metrics == {"samples/failed": 1, "samples/redrawn": 0, "groups/dropped": 0}


LOST, LOST_IN_GROUPS = scored((1, 0, [NAN, NAN])), scored((1, 0, [NAN, 1.0]), (2, 0, [NAN, 1.0]))


def test_a_first_step_with_nothing_left_to_train_on_is_an_error():
    with pytest.raises(DataError, match="step 1: the reward function failed on all 2 samples, last with: it broke"):
        RewardFailures(config("drop_sample")).update(1, LOST)
    with pytest.raises(DataError, match="step 1: .* failed on 2 of 4 samples, at least one in each group"):
        RewardFailures(config("drop_group")).update(1, LOST_IN_GROUPS)


def test_later_ones_are_counted_and_enough_of_them_in_a_row_are_an_error():
    failures = RewardFailures(RewardConfig(on_failure="drop_group", give_up_after=3))
    counts = []
    for step, rows in enumerate((TWO_GROUPS, LOST, LOST_IN_GROUPS, TWO_GROUPS, LOST, LOST), 1):
        failures.update(step, rows)
        counts.append(failures.metrics().get("samples/steps_without_reward", 0))
    assert counts == [0, 1, 2, 0, 1, 2]
    what = r"step 7: .* last with: it broke; it was the last of 3 such steps in a row \(reward.give_up_after\)"
    with pytest.raises(DataError, match=what) as caught:
        failures.update(7, LOST)
    assert not caught.value.retryable


def test_the_count_goes_on_where_the_run_does():
    before = {"failures": RewardFailures(RewardConfig(give_up_after=2))}
    before["failures"].update(8, LOST)
    after = {"failures": RewardFailures(RewardConfig(give_up_after=2))}
    load_state(after, dump_state(before))
    with pytest.raises(DataError, match="step 9: .* the last of 2 such steps in a row"):
        after["failures"].update(9, LOST)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ({"advantage": np.array([1.0, NAN, 2.0])}, [1]),
        ({"advantage": np.array([-np.inf, 0.0, np.inf])}, [0, 2]),
        (
            {"logprobs": Ragged.from_rows([np.array([0.0, NAN]), np.array([0.0]), np.array([-np.inf, 1.0, 2.0])])},
            [0, 2],
        ),
        ({"stacked": np.array([[0.0, NAN], [0.0, 1.0], [NAN, NAN]])}, [0, 2]),
        ({"text": ["nan", "inf", ""]}, []),
        ({"count": np.array([1, 2, 3])}, []),
    ],
)
def test_a_row_with_one_value_that_is_not_finite_is_found(column, expected):
    tokens = Ragged.from_rows([np.array([1, 2]), np.array([3]), np.array([4, 5, 6])])
    rows = Batch({"tokens": tokens, **column})
    assert find_nonfinite_rows(rows, np.zeros(6)) == expected
    assert find_nonfinite_rows(rows, np.array([0, 0, np.inf, 0, 0, 0])) == sorted({*expected, 1})


SAMPLES = [{"sample": f"sample {index} of prompt 1"} for index in range(10)]


@pytest.mark.parametrize(
    ("offending", "named"),
    [
        (SAMPLES[3:4], "not finite; samples with a value that is not finite: sample 3 of prompt 1 "),
        ([], "each sample alone is finite; together they were: sample 0 .* sample 7 of prompt 1 and 2 more "),
    ],
)
def test_a_refused_update_names_its_samples(offending, named):
    refused = []
    error = InvocationError("failed", role="ACTOR", rank=0, method="update")
    error.original = NonFiniteUpdate("the loss is not finite")
    with (
        pytest.raises(NonFiniteUpdate, match=f"step 5: .*{named}.*refused.jsonl"),
        annotate_errors_with_samples(5, lambda *row: refused.append(row), SAMPLES, lambda: offending),
    ):
        raise error
    assert refused == [(5, offending or SAMPLES)]


@pytest.mark.parametrize("original", [None, EngineError("out of memory")])
def test_another_error_of_an_update_names_no_samples(original):
    error = InvocationError("failed", role="ACTOR", rank=0, method="update")
    error.original = original
    with pytest.raises(InvocationError) as caught, annotate_errors_with_samples(5, None, SAMPLES, lambda: SAMPLES):
        raise error
    assert caught.value is error
