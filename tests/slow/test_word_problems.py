# SPDX-License-Identifier: Apache-2.0
"""GRPO by the rule of GSM8K raises the accuracy of a model that has learnt the format, on any seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_hundred_steps_gain_at_least_ten_points(tmp_path, seed):
    script, env = ROOT / "examples/word_problems/train.py", {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(seed)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/word-problems-grpo/latest"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["eval/accuracy"] - summary["before/eval/accuracy"] >= 0.10
    assert f"\neval/accuracy: {summary['eval/accuracy']}" in done.stdout
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 101
