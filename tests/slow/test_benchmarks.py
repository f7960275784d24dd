# SPDX-License-Identifier: Apache-2.0
"""Every benchmark of engines runs, a little of everything, and leaves its table."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("target", "name"),
    [("rollout", "rollout"), ("training", "training"), ("weight-sync", "weight_sync"), ("async", "running_ahead")],
)
def test_a_quick_run_leaves_a_table(tmp_path, target, name):
    arguments = f"ARGS=--quick --out {tmp_path}"
    done = subprocess.run(
        ["make", "bench", f"NAME={target}", arguments], cwd=ROOT, capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = tmp_path.glob(f"{name}*.json")
    assert json.loads(results.read_text(encoding="utf-8"))
    assert results.with_suffix(".md").read_text(encoding="utf-8").strip() in done.stdout


def test_a_run_that_may_run_ahead_ends_sooner_and_learns_as_well(tmp_path):
    arguments = f"ARGS=--seeds 0 --staleness 0 2 --out {tmp_path}"
    command = ["make", "bench", "NAME=async", arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = json.loads((tmp_path / "running_ahead.json").read_text(encoding="utf-8"))["runs"]
    (in_turns,), (ahead,) = runs["0"], runs["2"]
    assert in_turns["seconds"] / ahead["seconds"] > 1.5
    assert ahead["held_out"] > in_turns["held_out"] - 0.1


def test_a_grpo_step_crosses_at_most_100_modules():
    ran = subprocess.run(["make", "--silent", "trace-step", "ARGS=--count"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert 30 < int(ran.stdout.split()[-1]) <= 100
