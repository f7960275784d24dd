# SPDX-License-Identifier: Apache-2.0
"""Samples that the reward function failed on."""

from itertools import combinations

import numpy as np
import pytest

from dlrover.python.rl.algorithm.losses.columns import SampleView
from dlrover.python.rl.common.errors import DataError, EngineError, InvocationError, NonFiniteUpdate
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.recipe.base.config import METRIC_NAMES, RewardConfig
from dlrover.python.rl.recipe.base.updates import annotate_errors_with_samples, find_nonfinite_rows
from dlrover.python.rl.recipe.online.batch import select_logged
from dlrover.python.rl.recipe.reporting.rewards import (
    RewardFailures,
    collect_scores,
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
from tests.support.documented_metrics import documented, undocumented

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
def test_summary_keys_are_the_metrics_whatever_the_rewards(before, after):
    summary = summarize(worth(*before), worth(*after))
    assert list(summary) == [*(f"before/{name}" for name in EVALUATED), *EVALUATED]
    for prefix, rewards in (("before/", before), ("", after)):
        of_step = step_metrics(worth(*rewards))
        expected = {f"{prefix}{name}": of_step.get(name, NAN) for name in EVALUATED}
        assert {name: summary[name] for name in expected} == pytest.approx(expected, nan_ok=True)


def test_summary_of_another_number_of_prompts_has_no_scores_from_before():
    summary = summarize(worth(1.0, 0.0), worth(1.0))
    assert (summary["eval/reward"], np.isnan(summary["before/eval/reward"])) == (1.0, True)


def test_right_and_wrong_make_an_accuracy_and_a_failed_answer_is_wrong():
    told = step_metrics(worth(1.0, 1.0, NAN, 0.0))
    assert told == {"eval/accuracy": 0.5, "eval/reward": pytest.approx(2 / 3), "eval/failed": 1.0}


@pytest.mark.parametrize("after", [[0.5, 1.0, NAN], [-1.0, 2.5, NAN]])
def test_other_rewards_make_a_mean_over_the_judged_ones(after):
    assert step_metrics(worth(*after)) == {"eval/reward": 0.75, "eval/failed": 1.0}


def test_answers_of_which_none_was_judged_have_no_accuracy():
    told = step_metrics(worth(NAN, NAN))
    assert np.isnan(told["eval/reward"])
    assert told["eval/failed"] == 2.0


def test_an_answer_of_three_rows_is_right_when_they_add_up_to_it():
    rows = Batch(
        {
            "trajectory": np.array([5, 5, 5, 3]),
            "action_tokens": np.ones(4, dtype=np.int64),
            "reward": np.array([0.0, 0.0, 1.0, 0.0]),
        }
    )
    assert step_metrics(collect_scores(rows)) == {"eval/accuracy": 0.5, "eval/reward": 0.5, "eval/failed": 0.0}


@pytest.mark.feature(89)
def test_the_score_is_among_the_figures_where_there_is_one():
    before, after = ({**worth(0.5, 0.25), "score": np.array([score]).T} for score in ([0.0, 1.0], [1.0, NAN]))
    assert step_metrics(after) == {"eval/reward": 0.375, "eval/failed": 0.0, "eval/score": 1.0}
    assert set(step_metrics(after)) <= {*EVALUATED, "eval/score"}
    summary = summarize(before, after, evaluation_metrics([], 1, scored=True))
    assert (summary["before/eval/score"], summary["eval/score"]) == (0.5, 1.0)


def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one():
    right = np.random.default_rng(3).random((20, 7)) < 0.3
    for k in range(1, 8):
        choices = [row[list(chosen)].any() for row in right for chosen in combinations(range(7), k)]
        assert pass_at_k(right, k) == pytest.approx(np.mean(choices))


@pytest.mark.parametrize(("samples", "counts"), [(1, []), (2, [2]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])])
def test_the_k_of_pass_at_k(samples, counts):
    assert pass_counts(samples) == counts


def test_several_answers_have_their_mean_and_passes_where_a_failed_one_is_wrong():
    rewards = np.array([[1.0, 0.0, 0.0], [NAN, 0.0, 0.0]])
    metrics = step_metrics({"reward": rewards})
    assert metrics == {
        "eval/accuracy": pytest.approx(1 / 6),
        "eval/reward": pytest.approx(0.2),
        "eval/failed": 1.0,
        "eval/avg@3": pytest.approx(1 / 6),
        "eval/pass@2": pytest.approx(1 / 3),
        "eval/pass@3": 0.5,
    }
    assert set(metrics) == set(evaluation_metrics([], 3, scored=False))
    summary = summarize({"reward": rewards}, {"reward": np.ones((2, 3))}, metrics)
    assert (summary["before/eval/pass@2"], summary["eval/pass@2"]) == (pytest.approx(1 / 3), 1.0)


def test_other_rewards_have_no_passes_and_scores_of_an_environment_come_before_rewards():
    rewards, scores = np.array([[0.5, 1.5]]), np.array([[0.0, 1.0]])
    metrics = step_metrics({"reward": rewards})
    assert metrics == {"eval/reward": 1.0, "eval/failed": 0.0, "eval/avg@2": 1.0}
    scored = step_metrics({"reward": rewards, "score": scores})
    assert (scored["eval/avg@2"], scored["eval/pass@2"]) == (0.5, 1.0)


def test_named_sets_have_metrics_of_their_own():
    sets = {"easy": worth(1.0, 1.0), "hard": worth(0.0, 1.0)}
    metrics = metrics_of_sets(sets)
    assert (metrics["eval/easy/accuracy"], metrics["eval/hard/accuracy"]) == (1.0, 0.5)
    assert set(metrics) == set(evaluation_metrics(["easy", "hard"], 1, scored=False))
    summary = summarize_evaluations({"easy": worth(0.0, 1.0), "hard": worth(0.0, 0.0)}, sets, metrics)
    assert (summary["before/eval/easy/accuracy"], summary["eval/hard/accuracy"]) == (0.5, 0.5)


def test_a_name_that_the_glossary_lacks_is_found():
    assert undocumented([{"step": 1, "loss": 0.5, "reward/right": 1.0, "time/own_method": 2.0}]) == []
    assert undocumented([{"los": 0.5}, {"policy/foo": 1.0}]) == ["los", "policy/foo"]


def test_every_name_of_today_is_in_the_glossary_and_no_former_one_is():
    assert undocumented([dict.fromkeys(METRIC_NAMES.values(), 0.0)]) == []
    assert set(METRIC_NAMES) & set(documented()) == set()


def test_every_recipe_is_compared_with_it():
    assert policy_jobs.TRAINERS.keys() | example_jobs.TRAINERS.keys() == {"grpo", "ppo", "distill", "sft", "rm", "dpo"}
