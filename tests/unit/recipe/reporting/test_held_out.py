# SPDX-License-Identifier: Apache-2.0
"""What held-out answers are called."""

from itertools import combinations

import numpy as np
import pytest

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.reporting.evaluation import (
    EVALUATED,
    SCORED,
    collect_scores,
    compare_evaluations,
    compare_scores,
    evaluation_metrics,
    pass_at_k,
    pass_counts,
)
from dlrover.python.rl.recipe.reporting.evaluation import step_metrics as metrics_of_sets

NAN = float("nan")


def worth(*rewards):
    """One answer to each prompt, without a score."""
    return {"reward": np.array(rewards)[:, None]}


def step_metrics(scores):
    return metrics_of_sets({"": scores})


def test_right_and_wrong_make_an_accuracy_and_a_failed_answer_is_wrong():
    told = compare_scores(worth(0.0, 0.0, 1.0, 0.0), worth(1.0, 1.0, NAN, 0.0))
    assert told == {
        "held-out accuracy before": 0.25,
        "held-out accuracy after": 0.5,
        "gain in points": 25.0,
        "held-out failed before": 0,
        "held-out failed after": 1,
    }
    told = step_metrics(worth(1.0, 1.0, NAN, 0.0))
    assert told == {"eval/accuracy": 0.5, "eval/reward": pytest.approx(2 / 3), "eval/failed": 1.0}


@pytest.mark.parametrize("after", [[0.5, 1.0, NAN], [-1.0, 2.5, NAN]])
def test_other_rewards_make_a_mean_over_the_judged_ones(after):
    told = compare_scores(worth(0.0, 1.0, 1.0), worth(*after))
    assert told == {
        "held-out mean reward before": 0.6667,
        "held-out mean reward after": 0.75,
        "held-out failed before": 0,
        "held-out failed after": 1,
    }
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
    assert compare_scores(collect_scores(rows), collect_scores(rows.rows(0, 3)))["gain in points"] == 50.0


@pytest.mark.feature(89)
def test_the_score_is_among_the_figures_where_there_is_one():
    before, after = ({**worth(0.5, 0.25), "score": np.array([score]).T} for score in ([0.0, 1.0], [1.0, NAN]))
    assert step_metrics(after) == {"eval/reward": 0.375, "eval/failed": 0.0, "eval/score": 1.0}
    assert set(step_metrics(after)) <= {*EVALUATED, SCORED}
    told = compare_scores(before, after)
    assert (told["held-out mean score before"], told["held-out mean score after"]) == (0.5, 1.0)
    right = compare_scores({**before, **worth(1.0, 0.0)}, {**after, **worth(1.0, 1.0)})
    assert (right["gain in points"], right["held-out mean score after"]) == (50.0, 1.0)


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
    closing = compare_scores({"reward": rewards}, {"reward": np.ones((2, 3))})
    assert (closing["held-out pass@2 before"], closing["held-out pass@2 after"]) == (0.3333, 1.0)


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
    closing = compare_evaluations({"easy": worth(0.0, 1.0), "hard": worth(0.0, 0.0)}, sets)
    assert (closing["easy: gain in points"], closing["hard: gain in points"]) == (50.0, 50.0)
