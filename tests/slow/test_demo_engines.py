# SPDX-License-Identifier: Apache-2.0
"""The demo on other engines: the same job file but for one line, each in the environment that the command sets up."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(3600)]


RUNS = {
    "TRAIN=deepspeed": ("DeepSpeedTrainEngine", "TorchRolloutEngine"),
    "TRAIN=megatron": ("MegatronTrainEngine", "TorchRolloutEngine"),
    "ROLLOUT=vllm": ("Fsdp2TrainEngine", "VllmRolloutEngine"),
}
"""The classes of the engines that then run, as the processes that they run in have told."""


@pytest.mark.parametrize("engine", RUNS)
def test_the_demo_learns_on_any_engine(engine):
    done = subprocess.run(["make", "demo", engine], cwd=ROOT, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stderr
    summary = json.loads((ROOT / "build/demo/grpo/summary.json").read_text())
    assert (summary["train_engine"], summary["rollout_engine"]) == RUNS[engine]
    assert summary["eval/accuracy"] - summary["before/eval/accuracy"] >= 0.25
    after = summary["eval/accuracy"]
    assert f"by transformers alone: {after:.4f} (reported: {after:.4f})" in done.stdout
