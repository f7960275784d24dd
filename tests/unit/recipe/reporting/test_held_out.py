# SPDX-License-Identifier: Apache-2.0
"""What held-out answers are called."""

from itertools import combinations

import numpy as np
import pytest

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.reporting.rewards import (
    collect_scores,
    evaluation_metrics,
    pass_at_k,
    pass_counts,
    summarize_evaluations,
)
from dlrover.python.rl.recipe.reporting.rewards import step_metrics as metrics_of_sets

NAN = float("nan")
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
