# SPDX-License-Identifier: Apache-2.0
"""Rows as whole samples, as every figure counts them."""

import numpy as np
import pytest

from dlrover.python.rl.algorithm.losses.columns import SampleView
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.online.batch import select_logged
from dlrover.python.rl.recipe.reporting.rewards import merge_rows, number_samples, sample_metrics
from dlrover.python.rl.recipe.reporting.sample_file import format_rows

NAN = float("nan")

ROWS = Batch(
    {
        "prompt_id": np.array([7, 7, 7, 4, 4]),
        "sample_index": np.array([0, 0, 1, 0, 0]),
        "retry": np.array([1, 1, 1, 0, 0]),
        "turns": np.array([3, 3, 1, 2, 2]),
        "trajectory": np.array([70, 70, 71, 40, 40]),
        "reward": np.array([0.5, 0.25, 1.0, NAN, NAN]),
        "score": np.array([0.0, 1.0, 0.0, NAN, NAN]),
        "action_tokens": np.array([3, 4, 5, 6, 8]),
        "token_count": np.array([10, 20, 30, 40, 50]),
        "finished": np.array([False, True, False, True, False]),
        "staleness": np.array([0, 2, 1, 3, 1]),
        "completion": ["a", "b", "c", "d", "e"],
    }
)


def test_a_sample_of_several_rows_is_one():
    samples = {name: np.asarray(column).tolist() for name, column in merge_rows(ROWS).columns.items()}
    assert samples.pop("reward")[:2] == [0.75, 1.0]
    assert samples.pop("score")[:2] == [1.0, 0.0]
    assert samples == {
        "prompt_id": [7, 7, 4],
        "sample_index": [0, 1, 0],
        "retry": [1, 1, 0],
        "turns": [3, 1, 2],
        "finished": [True, False, False],
        "action_tokens": [7, 5, 14],
        "token_count": [30, 30, 90],
        "staleness": [2, 1, 3],
    }
    assert np.isnan(merge_rows(ROWS).dense("reward")[2])


def test_they_are_the_algorithms_samples_in_the_order_of_the_rows():
    of_row = SampleView.of(ROWS).of_row
    assert number_samples(ROWS).tolist() == [0, 0, 1, 2, 2]
    assert len(set(zip(of_row.tolist(), number_samples(ROWS).tolist(), strict=True))) == 3


def test_rows_that_name_no_trajectory_are_a_sample_each():
    alone = Batch({name: column for name, column in ROWS.columns.items() if name != "trajectory"})
    np.testing.assert_array_equal(merge_rows(alone).dense("reward"), ROWS.dense("reward"))
    assert len(merge_rows(ROWS.take([]))) == 0


def test_a_steps_figures_are_means_over_samples():
    assert sample_metrics(ROWS) == pytest.approx(
        {
            "reward/mean": 0.875,
            "reward/std": 0.125,
            "reward/min": 0.75,
            "reward/max": 1.0,
            "reward/score": 0.5,
            "completions/length_mean": 26 / 3,
            "completions/length_min": 5,
            "completions/length_p50": 7,
            "completions/length_p95": 7 + 0.9 * 7,
            "completions/length_max": 14,
            "completions/truncated": 2 / 3,
        }
    )


def test_the_parts_of_a_reward_are_means_over_the_scored_samples():
    alone = Batch({name: column for name, column in ROWS.columns.items() if name not in ("trajectory", "score")})
    parts = {"reward/right": np.array([1.0, 0.0, 1.0, NAN, NAN]), "reward/short": np.array([0.0, 0.5, 0.1, NAN, NAN])}
    rows = alone.with_columns(**parts)
    metrics = sample_metrics(rows)
    assert metrics["reward/right"] == pytest.approx(2 / 3)
    assert metrics["reward/short"] == pytest.approx(0.2)
    assert "reward/score" not in metrics
    assert select_logged(rows, rows=5).dense("reward/short").tolist()[:3] == [0.0, 0.5, 0.1]


def test_of_samples_without_any_reward_only_the_mean_is_told():
    metrics = sample_metrics(ROWS.take([3, 4]))
    assert np.isnan(metrics["reward/mean"])
    assert "reward/std" not in metrics


def test_what_failed_before_its_first_token_is_no_truncated_completion():
    failed = ROWS.take([3, 4]).with_columns(action_tokens=np.array([0, 0]), finished=np.array([False, False]))
    metrics, lengths = sample_metrics(Batch.concat([ROWS.take([0, 1]), failed])), "completions/length_"
    assert metrics["completions/truncated"] == 0.0
    assert [metrics[f"{lengths}{name}"] for name in ("mean", "min", "p50", "max")] == [7] * 4
    assert not [name for name in sample_metrics(failed) if name.startswith("completions/")]


@pytest.mark.feature(89)
def test_rows_for_people_have_the_score_and_say_whose_they_are():
    told = list(format_rows(select_logged(ROWS, rows=5), ROWS.select("completion")))
    assert [row["trajectory"] for row in told] == [0, 0, 1, 2, 2]
    assert [row["score"] for row in told[:3]] == [0.0, 1.0, 0.0]
    assert [row["row"] for row in told] == [2, 2, 2, 4, 4]
