"""What held-out answers are called."""

import numpy as np
import pytest

from dlrover.python.rl.recipe.held_out import before_and_after, step_metrics

NAN = float("nan")


def test_right_and_wrong_make_an_accuracy_and_a_failed_answer_is_wrong():
    told = before_and_after(np.array([0.0, 0.0, 1.0, 0.0]), np.array([1.0, 1.0, NAN, 0.0]))
    assert told == {
        "held-out accuracy before": 0.25,
        "held-out accuracy after": 0.5,
        "gain in points": 25.0,
        "held-out failed before": 0,
        "held-out failed after": 1,
    }
    told = step_metrics(np.array([1.0, 1.0, NAN, 0.0]))
    assert told == {"accuracy": 0.5, "held_out_reward": pytest.approx(2 / 3), "held_out_failed": 1.0}


@pytest.mark.parametrize("after", [[0.5, 1.0, NAN], [-1.0, 2.5, NAN]])
def test_other_rewards_make_a_mean_over_the_judged_ones(after):
    told = before_and_after(np.array([0.0, 1.0, 1.0]), np.array(after))
    assert told == {
        "held-out mean reward before": 0.6667,
        "held-out mean reward after": 0.75,
        "held-out failed before": 0,
        "held-out failed after": 1,
    }
    assert step_metrics(np.array(after)) == {"held_out_reward": 0.75, "held_out_failed": 1.0}


def test_answers_of_which_none_was_judged_have_no_accuracy():
    told = step_metrics(np.array([NAN, NAN]))
    assert np.isnan(told["held_out_reward"])
    assert told["held_out_failed"] == 2.0
