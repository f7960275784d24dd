# SPDX-License-Identifier: Apache-2.0
"""A job file ends in the same bits in one process, on Ray and under torchrun, with any number of workers."""

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_here, run_on_ray
from tests.support.commands import ROOT
from tests.support.launching import distance
from tests.support.policy_jobs import grpo_job
from tests.support.run_files import read_lines

pytestmark = pytest.mark.ray

SHORT = ("steps=2", "algorithm.kl_coef=0", "optimizer.warmup_steps=0")
JUMBLED = ("reward.function=tests.support.policy_rewards:jumble",)
"""A model that has learnt nothing gives no right answers: with rewards that tell them apart the weights move."""

SPLIT = "+engine.parallel={tensor_parallel_size: 2}"
PLACES = {"local": (1, 2), "ray-2": (2, 2)}
"""Where, and how many actors and rollouts."""


def run_in(place, folder, actors, rollouts, *more_overrides, reward=JUMBLED):
    """Run the job in a place, to a folder of that name in ``folder``."""
    sizes = [f"workload.actor.num={actors}", f"workload.rollout.num={rollouts}", "trainer.device_per_node=8"]
    groups = f"workload_group=[{{actor: {actors}}}]"
    overrides = [f"name={place}", f"job_dir={folder / place}", f"+env.PYTHONPATH={ROOT}", *sizes, groups]
    job = grpo_job(folder, *overrides, *more_overrides, *SHORT, *reward)
    # Without a KL penalty the reference is idle.
    job = replace(job, workloads={role: spec for role, spec in job.workloads.items() if role != "REFERENCE"})
    local = place.startswith("local")
    status = run_here(check_job(job, local=True)) if local else run_on_ray(check_job(job), connected=True)
    assert status.phase is Phase.FINISHED, status


@pytest.fixture(scope="module")
def folder(tmp_path_factory, ray_session):
    """A folder with the output of the job in each place."""
    path = tmp_path_factory.mktemp("everywhere")
    sys.path.append(str(ROOT))
    for place, (actors, rollouts) in PLACES.items():
        run_in(place, path, actors, rollouts)
    return path


def samples(job_dir):
    """Prompt, index and reward of the first step's samples."""
    names = ("prompt_id", "sample_index", "completion", "reward")
    return [tuple(row[name] for name in names) for row in read_lines(job_dir / "samples.jsonl") if row["step"] == 1]


def assert_same_end(folder, one, other):
    assert distance(folder / one / "model", folder / other / "model") < 1e-5


@pytest.mark.slow
def test_samples_of_the_first_step_are_the_same_everywhere(folder):
    seen = [samples(folder / name) for name in PLACES]
    assert len(seen[0]) == 4 * 8
    assert all(one == other for one, other in pairwise(seen))


@pytest.mark.slow
def test_two_actor_ranks_end_in_the_weights_of_one(folder):
    assert distance(folder / "model", folder / "local/model") > 1e-4
    assert_same_end(folder, "local", "ray-2")


@pytest.mark.slow
def test_two_halves_of_an_actor_end_in_the_weights_of_one(folder):
    run_in("ray-split", folder, 2, 1, SPLIT)
    assert samples(folder / "ray-split") == samples(folder / "local")
    assert_same_end(folder, "local", "ray-split")


@pytest.mark.feature(109)
@pytest.mark.slow
def test_reward_model_gives_the_same_everywhere(folder):
    judge = folder / "judge"
    AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1).save_pretrained(judge)
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(judge)
    reward = (f"+reward.model={judge}", "workload.reward.class=ModelRewardWorkload")
    run_in("local-judged", folder, 1, 1, reward=reward)
    run_in("ray-judged", folder, 2, 2, "workload.reward.num=2", reward=reward)
    by_place = [samples(folder / place) for place in ("local-judged", "ray-judged")]
    rewards = [torch.tensor([reward for *_, reward in rows]) for rows in by_place]
    assert [row[:3] for row in by_place[0]] == [row[:3] for row in by_place[1]]
    torch.testing.assert_close(*rewards, atol=1e-5, rtol=0)
    assert len(rewards[0].unique()) > 8
    assert_same_end(folder, "local-judged", "ray-judged")
