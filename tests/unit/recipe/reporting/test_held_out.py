# SPDX-License-Identifier: Apache-2.0
"""What held-out answers are called."""

import numpy as np
import pytest

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.reporting.metrics import EVALUATED, SCORED, collect_scores, compare_scores, step_metrics

NAN = float("nan")


def worth(*rewards):
    """Answers without a score."""
    return {"reward": np.array(rewards)}


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
    before, after = ({"reward": np.array([0.5, 0.25]), "score": np.array(score)} for score in ([0.0, 1.0], [1.0, NAN]))
    assert step_metrics(after) == {"eval/reward": 0.375, "eval/failed": 0.0, "eval/score": 1.0}
    assert set(step_metrics(after)) <= {*EVALUATED, SCORED}
    told = compare_scores(before, after)
    assert (told["held-out mean score before"], told["held-out mean score after"]) == (0.5, 1.0)
    right = compare_scores({**before, **worth(1.0, 0.0)}, {**after, **worth(1.0, 1.0)})
    assert (right["gain in points"], right["held-out mean score after"]) == (50.0, 1.0)
