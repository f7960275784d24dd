# SPDX-License-Identifier: Apache-2.0
"""The agent of the guide learns its task through the public client of OpenAI's API, and only from its own rewards."""

import pytest

from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.commands import ROOT
from tests.support.policy_jobs import SHAPE, finished
from tests.support.run_files import read_json

pytestmark = [pytest.mark.slow, pytest.mark.needs("openai"), pytest.mark.timeout(1800)]

SHUFFLED = ["algorithm.name=tests.support.shuffled_grpo:ShuffledGRPO"]
SIZES = ["steps=40", "prompts_per_step=2", "rollout.samples_per_prompt=8", "optimizer.lr=1e-2", "engine.threads=1"]


def train(folder, seed, *overrides):
    """Return the greedy reward before and after training."""
    write_tiny_model(folder / "model", **{**SHAPE, "max_positions": 256})
    paths = [
        f"model={folder / 'model'}",
        f"job_dir={folder / 'out'}",
        f"data.train={ROOT}/docs/guides/agents/words.jsonl",
    ]
    paths += [f"environment.agent={ROOT}/docs/guides/agents/letters.py:run", f"seed={seed}"]
    out, _ = finished(load_job(ROOT / "docs/guides/agents/letters.yaml", [*paths, *SIZES, *overrides]))
    summary = read_json(out / "summary.json")
    assert summary["eval/failed"] == 0
    return summary["before/eval/reward"], summary["eval/reward"]


@pytest.mark.feature(159)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agent_learns_and_not_from_shuffled_advantages(tmp_path, seed):
    before, after = train(tmp_path / "own", seed)
    assert after - before >= 0.2
    before, after = train(tmp_path / "shuffled", seed, *SHUFFLED)
    assert after - before < 0.2
