# SPDX-License-Identifier: Apache-2.0
"""One job whose actor trains with one backend and whose rollouts sample with another, each in its environment."""

import os
import signal

import numpy as np
import pytest
import yaml

from tests.support.commands import Desk, processes_below, wait_for
from tests.support.other_environments import engine_python, needs_environments
from tests.support.policy_jobs import write_inputs
from tests.support.run_files import read_json, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

STEPS = 60
SHAPE = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2, "max_positions": 64}  # heads of 32, as vLLM needs
OPTIONS = {"megatron": {"cpu_shim": True}, "deepspeed": {}}
ENGINES = [pytest.param(train, marks=needs_environments(train, "vllm")) for train in OPTIONS]
VICTIMS = {STEPS // 4: "Rollout", STEPS // 2: "Actor", 3 * STEPS // 4: "Reward"}
"""The role whose process is killed after a step."""


def job_text(train):
    config = {
        "model": "model",
        "data": {"train": "problems.jsonl", "eval_rows": 4},
        "reward": {"function": "tests.support.policy_rewards:low", "workers": 1, "timeout_s": 60.0},
        "rollout": {"samples_per_prompt": 8, "max_new_tokens": 8},
        "engine": {"train": train, "rollout": "vllm", "threads": 1, "train_options": OPTIONS[train]},
        "optimizer": {"lr": 3e-3},
    }
    roles = {
        "actor": {"num": 1, "python": engine_python(train)},
        "rollout": {"num": 1, "python": engine_python("vllm")},
        "reward": 1,
    }
    job = {"recipe": "grpo", "trainer": {"device_type": "CPU", "device_per_node": 8}, "roles": roles}
    return yaml.safe_dump({**job, "config": {**config, "steps": STEPS, "prompts_per_step": 4}})


@pytest.mark.parametrize("train", ENGINES)
def test_backends_that_exclude_each_other_learn_in_one_job(tmp_path, train):
    """A process of each role is killed."""
    write_inputs(tmp_path, SHAPE)
    (tmp_path / "job.yaml").write_text(job_text(train))
    metrics = tmp_path / "out/metrics.jsonl"
    with Desk(tmp_path, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1") as desk:
        job = desk.start("run", "job.yaml", "job_dir=out")
        for step, role in VICTIMS.items():
            done = lambda step=step: metrics.exists() and len(metrics.read_text().splitlines()) > step  # noqa: E731
            wait_for(lambda done=done: done() or job.poll() is not None, 280)
            assert job.poll() is None, job.said()[-4000:]
            processes = processes_below(job.pid).items()
            (victim,) = [pid for pid, line in processes if line.startswith(f"ray::{role}Workload")]
            os.kill(victim, signal.SIGKILL)
        output = job.end(within_s=280)
    for role in VICTIMS.values():
        assert f"{role.upper()}: replaced rank 0" in output, role
    summary, steps = read_json(tmp_path / "out/summary.json"), steps_of(tmp_path / "out")
    assert [summary["train_engine"].lower(), summary["rollout_engine"]] == [f"{train}trainengine", "VllmRolloutEngine"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    rewards = np.array([step["reward/mean"] for step in steps])
    assert rewards[-5:].mean() > rewards[:5].mean() + 0.25, rewards
