# SPDX-License-Identifier: Apache-2.0
"""The demo, whole, on three seeds: the promise of the README."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_gains_at_least_25_points_and_its_model_loads_anywhere(tmp_path, seed):
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/arithmetic/demo.py"), "--seed", str(seed)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began_s < 300
    out = tmp_path / "build" / "demo" / "grpo"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["eval/accuracy"] - summary["before/eval/accuracy"] >= 0.25
    after = summary["eval/accuracy"]
    assert f"by transformers alone: {after:.4f} (reported: {after:.4f})" in done.stdout
    for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl", "reward.png", "model/model.safetensors"):
        assert (out / name).stat().st_size > 0, name
