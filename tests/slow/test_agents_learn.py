# SPDX-License-Identifier: Apache-2.0
"""Agents learn their tasks through the public client of OpenAI's API, and only from their own rewards."""

import pytest

from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.commands import ROOT
from tests.support.policy_jobs import SHAPE, finished
from tests.support.run_files import read_json

pytestmark = [pytest.mark.slow, pytest.mark.needs("openai"), pytest.mark.timeout(600)]

SHUFFLED = ["algorithm.name=tests.support.shuffled_grpo:ShuffledGRPO"]
SIZES = ["steps=40", "prompts_per_step=2", "rollout.samples_per_prompt=8", "optimizer.lr=1e-2", "engine.threads=1"]
LETTERS = [
    f"environment.agent={ROOT}/docs/guides/agents/letters.py:run",
    f"data.train={ROOT}/docs/guides/agents/words.jsonl",
    "optimizer.lr=3e-3",  # at 1e-2 noise alone can end in a policy that writes one letter
]
PACKAGES = {
    "verifiers": ["environment.agent=verifiers", "+environment.options={taskset: letters_taskset}"],
    "reasoning_gym": [
        "environment.agent=reasoning_gym",
        "+environment.options={task: gcd, min_value: 2, max_value: 3, tag: '', instruction: '{question}'}",
        "rollout.max_new_tokens=1",
    ],
}


def train(folder, seed, *overrides):
    """Return the greedy reward before and after training."""
    write_tiny_model(folder / "model", **{**SHAPE, "max_positions": 256})
    paths = [f"model={folder / 'model'}", f"job_dir={folder / 'out'}", f"seed={seed}"]
    out, _ = finished(load_job(ROOT / "docs/guides/agents/letters.yaml", [*SIZES, *paths, *overrides]))
    summary = read_json(out / "summary.json")
    assert summary["eval/failed"] == 0
    return summary["before/eval/reward"], summary["eval/reward"]


@pytest.mark.feature(159)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agent_learns_its_task(tmp_path, seed):
    before, after = train(tmp_path, seed, *LETTERS)
    assert after - before >= 0.2


@pytest.mark.feature(159)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agent_does_not_learn_from_shuffled_advantages(tmp_path, seed):
    before, after = train(tmp_path, seed, *LETTERS, *SHUFFLED)
    assert after - before < 0.2


@pytest.mark.feature(159)
@pytest.mark.parametrize("package", [pytest.param(name, marks=pytest.mark.needs(name)) for name in PACKAGES])
def test_agent_of_another_package_learns(tmp_path, monkeypatch, package):
    monkeypatch.syspath_prepend(str(ROOT / "tests/support/tasksets"))
    before, after = train(tmp_path, 0, "data.train=null", "data.eval_rows=16", *PACKAGES[package])
    assert after - before >= 0.2
