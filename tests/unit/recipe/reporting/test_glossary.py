# SPDX-License-Identifier: Apache-2.0
"""The glossary of metrics. The jobs of ``policy_jobs`` and ``example_jobs`` compare with it what every run of theirs
logs."""

from dlrover.python.rl.recipe.base.config import METRIC_NAMES
from tests.support import example_jobs, policy_jobs
from tests.support.documented_metrics import documented, undocumented


def test_a_name_that_the_glossary_lacks_is_found():
    assert undocumented([{"step": 1, "loss": 0.5, "reward/right": 1.0, "time/own_method": 2.0}]) == []
    assert undocumented([{"los": 0.5}, {"policy/foo": 1.0}]) == ["los", "policy/foo"]


def test_every_name_of_today_is_in_the_glossary_and_no_former_one_is():
    assert undocumented([dict.fromkeys(METRIC_NAMES.values(), 0.0)]) == []
    assert set(METRIC_NAMES) & set(documented()) == set()


def test_every_recipe_is_compared_with_it():
    assert policy_jobs.TRAINERS.keys() | example_jobs.TRAINERS.keys() == {"grpo", "ppo", "distill", "sft", "rm", "dpo"}
