# SPDX-License-Identifier: Apache-2.0
"""Metrics of rewards: failed samples, rows as whole samples, evaluations, and the glossary of their names."""

from itertools import combinations

import numpy as np
import pytest

from dlrover.python.rl.algorithm.losses.columns import SampleView
from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.base.config import METRIC_NAMES, RewardConfig
from dlrover.python.rl.recipe.online.batch import select_logged
from dlrover.python.rl.recipe.reporting.rewards import (
    RewardFailures,
    evaluation_metrics,
    failure_metrics,
    find_failed_groups,
    mask_rewards,
    merge_rows,
    number_samples,
    pass_at_k,
    pass_counts,
    sample_metrics,
    summarize_evaluations,
)
from dlrover.python.rl.recipe.reporting.rewards import step_metrics as metrics_of_sets
from dlrover.python.rl.recipe.reporting.sample_file import format_rows
from dlrover.python.rl.trainer.steps import dump_state, load_state
from tests.support import example_jobs, policy_jobs
from tests.support.run_files import documented, undocumented

NAN = float("nan")


def scored(*draws):
    """Rows of (prompt id, retry, rewards)."""
    rows = [(prompt, retry, reward) for prompt, retry, rewards in draws for reward in rewards]
    prompts, retries, scores = map(np.array, zip(*rows, strict=True))
    numbers = {"prompt_id": prompts, "retry": retries, "reward": scores, "action_tokens": np.ones_like(prompts)}
    return Batch(numbers | {"error": ["it broke" if np.isnan(score) else None for score in scores]})


def rewards(batch):
    return [None if np.isnan(value) else value for value in batch.dense("reward").tolist()]


TWO_GROUPS = scored((4, 0, [1.0, NAN]), (9, 0, [0.0, 1.0]))
LOST, LOST_IN_GROUPS = scored((1, 0, [NAN, NAN])), scored((1, 0, [NAN, 1.0]), (2, 0, [NAN, 1.0]))


@pytest.mark.parametrize(
    ("on_failure", "redrawn", "masked", "counts"),
    [
        ("drop_sample", [], [1.0, None, 0.0, 1.0], (1, 0, 0)),
        ("drop_group", [], [None, None, 0.0, 1.0], (1, 0, 1)),
        ("redraw", [0.0, 0.5], [None, None, 0.0, 1.0, 0.0, 0.5], (1, 2, 0)),
        ("redraw", [NAN, 0.5], [None, None, 0.0, 1.0, None, None], (2, 2, 1)),
    ],
)
def test_rewards_of_failed_samples_or_groups_are_masked(on_failure, redrawn, masked, counts):
    """A redrawn group takes the failed one's place, unless it fails again."""
    batch = Batch.concat([TWO_GROUPS, scored((4, 1, redrawn))]) if redrawn else TWO_GROUPS
    rows = mask_rewards(batch, RewardConfig(on_failure=on_failure))
    assert rewards(rows) == masked
    names = ("samples/failed", "samples/redrawn", "groups/dropped")
    assert failure_metrics(batch, rows) == dict(zip(names, counts, strict=True))
    assert find_failed_groups(batch).tolist() == ([] if redrawn == [0.0, 0.5] else [4]), "the last draw alone decides"


def test_failed_sample_of_three_rows_is_one_failed_sample():
    rows = scored((4, 1, [NAN, NAN, NAN, 1.0]), (9, 0, [0.0, 1.0]))
    rows = rows.with_columns(trajectory=np.array([0, 0, 0, 1, 2, 3]))
    metrics = failure_metrics(rows, mask_rewards(rows, RewardConfig(on_failure="drop_sample")))
    assert metrics == {"samples/failed": 1, "samples/redrawn": 2, "groups/dropped": 0}
    with pytest.raises(DataError, match="failed on all 1 samples"):
        RewardFailures(RewardConfig(on_failure="drop_sample")).update(1, rows.rows(0, 3))


def test_failures_in_filtered_groups_are_counted():
    metrics = failure_metrics(TWO_GROUPS, mask_rewards(TWO_GROUPS.rows(2, 4), RewardConfig(on_failure="drop_group")))
    assert metrics == {"samples/failed": 1, "samples/redrawn": 0, "groups/dropped": 0}


@pytest.mark.parametrize(
    ("on_failure", "rows", "message"),
    [
        ("drop_sample", LOST, "step 1: the reward function failed on all 2 samples, last with: it broke"),
        ("drop_group", LOST_IN_GROUPS, "step 1: .* failed on 2 of 4 samples, at least one in each group"),
    ],
)
def test_first_step_without_any_reward_is_an_error(on_failure, rows, message):
    with pytest.raises(DataError, match=message):
        RewardFailures(RewardConfig(on_failure=on_failure)).update(1, rows)


def test_enough_later_steps_without_any_reward_are_an_error():
    failures = RewardFailures(RewardConfig(on_failure="drop_group", give_up_after=3))
    counts = []
    for step, rows in enumerate((TWO_GROUPS, LOST, LOST_IN_GROUPS, TWO_GROUPS, LOST, LOST), 1):
        failures.update(step, rows)
        counts.append(failures.metrics().get("samples/steps_without_reward", 0))
    assert counts == [0, 1, 2, 0, 1, 2]
    again = {"failures": RewardFailures(RewardConfig(on_failure="drop_group", give_up_after=3))}
    load_state(again, dump_state({"failures": failures}))
    message = r"step 7: .* last with: it broke; it was the last of 3 such steps in a row \(reward.give_up_after\)"
    with pytest.raises(DataError, match=message) as caught:
        again["failures"].update(7, LOST)
    assert not caught.value.retryable


# -- rows as whole samples ---------------------------------------------------------------------------------------------

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
ALONE = Batch({name: column for name, column in ROWS.columns.items() if name not in ("trajectory", "score")})


def test_rows_of_a_sample_are_merged():
    samples = {name: np.asarray(column).tolist() for name, column in merge_rows(ROWS).columns.items()}
    assert (samples.pop("reward")[:2], samples.pop("score")[:2]) == ([0.75, 1.0], [1.0, 0.0])
    expected = {"prompt_id": [7, 7, 4], "sample_index": [0, 1, 0], "retry": [1, 1, 0], "turns": [3, 1, 2]}
    expected |= {"finished": [True, False, False], "action_tokens": [7, 5, 14]}
    assert samples == expected | {"token_count": [30, 30, 90], "staleness": [2, 1, 3]}
    assert np.isnan(merge_rows(ROWS).dense("reward")[2])
    of_row = SampleView.of(ROWS).of_row
    assert number_samples(ROWS).tolist() == [0, 0, 1, 2, 2]
    assert len(set(zip(of_row.tolist(), number_samples(ROWS).tolist(), strict=True))) == 3


def test_rows_without_a_trajectory_are_a_sample_each():
    np.testing.assert_array_equal(merge_rows(ALONE).dense("reward"), ROWS.dense("reward"))
    assert len(merge_rows(ROWS.take([]))) == 0


def test_metrics_of_a_step_are_means_over_samples():
    metrics = {"reward/mean": 0.875, "reward/std": 0.125, "reward/min": 0.75, "reward/max": 1.0, "reward/score": 0.5}
    lengths = {"mean": 26 / 3, "min": 5, "p50": 7, "p95": 7 + 0.9 * 7, "max": 14}
    metrics |= {f"completions/length_{name}": length for name, length in lengths.items()}
    assert sample_metrics(ROWS) == pytest.approx(metrics | {"completions/truncated": 2 / 3})
    unscored = sample_metrics(ROWS.take([3, 4]))
    assert np.isnan(unscored["reward/mean"]) and "reward/std" not in unscored


def test_parts_of_a_reward_are_means_over_scored_samples():
    parts = {"reward/right": np.array([1.0, 0.0, 1.0, NAN, NAN]), "reward/short": np.array([0.0, 0.5, 0.1, NAN, NAN])}
    rows = ALONE.with_columns(**parts)
    metrics = sample_metrics(rows)
    assert (metrics["reward/right"], metrics["reward/short"]) == pytest.approx((2 / 3, 0.2))
    assert "reward/score" not in metrics
    assert select_logged(rows, rows=5).dense("reward/short").tolist()[:3] == [0.0, 0.5, 0.1]


def test_sample_without_a_token_is_no_truncated_completion():
    failed = ROWS.take([3, 4]).with_columns(action_tokens=np.array([0, 0]), finished=np.array([False, False]))
    metrics, lengths = sample_metrics(Batch.concat([ROWS.take([0, 1]), failed])), "completions/length_"
    assert metrics["completions/truncated"] == 0.0
    assert [metrics[f"{lengths}{name}"] for name in ("mean", "min", "p50", "max")] == [7] * 4
    assert not [name for name in sample_metrics(failed) if name.startswith("completions/")]


@pytest.mark.feature(89)
def test_logged_rows_have_the_score_and_their_sample():
    rows = list(format_rows(select_logged(ROWS, rows=5), ROWS.select("completion")))
    assert [(row["trajectory"], row["row"]) for row in rows] == [(0, 2), (0, 2), (1, 2), (2, 4), (2, 4)]
    assert [row["score"] for row in rows[:3]] == [0.0, 1.0, 0.0]


# -- evaluations -------------------------------------------------------------------------------------------------------

EVALUATED = ("eval/accuracy", "eval/reward", "eval/failed")


def worth(*rewards):
    """One answer to each prompt, without a score."""
    return {"reward": np.array(rewards)[:, None]}


def step_metrics(scores):
    return metrics_of_sets({"": scores})


def summarize(before, after, names=EVALUATED):
    return summarize_evaluations({"": before}, {"": after}, names)


@pytest.mark.parametrize("before", [[1.0, 0.0], [0.5, 2.5]])
@pytest.mark.parametrize("after", [[1.0, 1.0], [0.5, 1.0], [NAN, 0.0], [NAN, NAN]])
def test_summary_has_the_same_keys_with_any_rewards(before, after):
    summary = summarize(worth(*before), worth(*after))
    assert list(summary) == [*(f"before/{name}" for name in EVALUATED), *EVALUATED]
    for prefix, rewards in (("before/", before), ("", after)):
        of_step = step_metrics(worth(*rewards))
        expected = {f"{prefix}{name}": of_step.get(name, NAN) for name in EVALUATED}
        assert {name: summary[name] for name in expected} == pytest.approx(expected, nan_ok=True)


def test_summary_of_other_prompts_has_no_earlier_scores():
    summary = summarize(worth(1.0, 0.0), worth(1.0))
    assert (summary["eval/reward"], np.isnan(summary["before/eval/reward"])) == (1.0, True)


@pytest.mark.parametrize(
    ("answers", "metrics"),
    [
        ([1.0, 1.0, NAN, 0.0], {"eval/accuracy": 0.5, "eval/reward": pytest.approx(2 / 3), "eval/failed": 1.0}),
        ([0.5, 1.0, NAN], {"eval/reward": 0.75, "eval/failed": 1.0}),
        ([-1.0, 2.5, NAN], {"eval/reward": 0.75, "eval/failed": 1.0}),
    ],
)
def test_accuracy_is_of_rewards_0_and_1_alone(answers, metrics):
    """A failed answer is wrong."""
    assert step_metrics(worth(*answers)) == metrics


@pytest.mark.feature(89)
def test_score_is_among_the_metrics_where_there_is_one():
    before, after = ({**worth(0.5, 0.25), "score": np.array([score]).T} for score in ([0.0, 1.0], [1.0, NAN]))
    assert step_metrics(after) == {"eval/reward": 0.375, "eval/failed": 0.0, "eval/score": 1.0}
    summary = summarize(before, after, evaluation_metrics([], 1, scored=True))
    assert (summary["before/eval/score"], summary["eval/score"]) == (0.5, 1.0)


def test_pass_at_k_is_the_share_of_choices_with_a_right_one():
    right = np.random.default_rng(3).random((20, 7)) < 0.3
    for k in range(1, 8):
        choices = [row[list(chosen)].any() for row in right for chosen in combinations(range(7), k)]
        assert pass_at_k(right, k) == pytest.approx(np.mean(choices))
    counts = {1: [], 2: [2], 4: [2, 4], 6: [2, 4, 6], 8: [2, 4, 8]}
    assert {samples: pass_counts(samples) for samples in counts} == counts


def test_several_answers_have_their_mean_and_passes():
    rewards = np.array([[1.0, 0.0, 0.0], [NAN, 0.0, 0.0]])
    metrics = step_metrics({"reward": rewards})
    expected = {"eval/accuracy": 1 / 6, "eval/reward": 0.2, "eval/failed": 1.0, "eval/avg@3": 1 / 6}
    assert metrics == pytest.approx(expected | {"eval/pass@2": 1 / 3, "eval/pass@3": 0.5})
    assert set(metrics) == set(evaluation_metrics([], 3, scored=False))
    summary = summarize({"reward": rewards}, {"reward": np.ones((2, 3))}, metrics)
    assert (summary["before/eval/pass@2"], summary["eval/pass@2"]) == (pytest.approx(1 / 3), 1.0)


def test_passes_are_of_scores_or_of_rewards_0_and_1():
    rewards, scores = np.array([[0.5, 1.5]]), np.array([[0.0, 1.0]])
    assert step_metrics({"reward": rewards}) == {"eval/reward": 1.0, "eval/failed": 0.0, "eval/avg@2": 1.0}
    scored = step_metrics({"reward": rewards, "score": scores})
    assert (scored["eval/avg@2"], scored["eval/pass@2"]) == (0.5, 1.0)


def test_named_sets_have_their_own_metrics():
    sets = {"easy": worth(1.0, 1.0), "hard": worth(0.0, 1.0)}
    metrics = metrics_of_sets(sets)
    assert (metrics["eval/easy/accuracy"], metrics["eval/hard/accuracy"]) == (1.0, 0.5)
    assert set(metrics) == set(evaluation_metrics(["easy", "hard"], 1, scored=False))
    summary = summarize_evaluations({"easy": worth(0.0, 1.0), "hard": worth(0.0, 0.0)}, sets, metrics)
    assert (summary["before/eval/easy/accuracy"], summary["eval/hard/accuracy"]) == (0.5, 0.5)


def test_glossary_has_every_metric_and_no_former_one():
    assert undocumented([{"step": 1, "loss": 0.5, "reward/right": 1.0, "time/own_method": 2.0}]) == []
    assert undocumented([{"los": 0.5}, {"policy/foo": 1.0}]) == ["los", "policy/foo"]
    assert undocumented([dict.fromkeys(METRIC_NAMES.values(), 0.0)]) == []
    assert set(METRIC_NAMES) & set(documented()) == set()
    assert policy_jobs.TRAINERS.keys() | example_jobs.TRAINERS.keys() == {"grpo", "ppo", "distill", "sft", "rm", "dpo"}
