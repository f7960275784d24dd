# SPDX-License-Identifier: Apache-2.0
"""A tracker that a file outside the package adds: the guide's, named by ``module:Class``."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import LogConfig
from dlrover.python.rl.recipe.reporting.trackers import validate_log

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guides/learn-from-examples.md"
DEADLINE_S = 120.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(class CsvTracker:.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_tracker.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_run_sends_its_metrics_to_the_tracker_of_a_file(folder):
    write_tiny_model(folder / "tiny", hidden=32, layers=1, max_positions=32)
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = ["model=tiny", "data.train=sums.jsonl", "batch_size=2", "job_dir=out", "engine.threads=1"]
    tracker = "log.trackers=[{my_tracker:CsvTracker: {file: losses.csv}}]"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dlrover.python.rl.recipe.sft", *job, tracker]
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert run.returncode == 0, run.stderr
    steps = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = (folder / "out/losses.csv").read_text(encoding="utf-8").splitlines()
    assert lines == [f"{row['step']},{row['loss']}" for row in steps]
    assert len(lines) == 2


def test_an_unknown_tracker_and_a_wrong_option_are_config_errors(folder):
    config = LogConfig(("wandbb", {"my_tracker:CsvTracker": {"fil": "x"}}, "my_tracker:CvsTracker"))
    unknown, option, attribute = validate_log(config)
    assert {error.where for error in (unknown, option, attribute)} == {"config.log.trackers"}
    assert "no tracker is called 'wandbb'; did you mean 'wandb'?" in unknown.what
    assert option.what == "my_tracker:CsvTracker: got an unexpected keyword argument 'fil'"
    assert "did you mean 'CsvTracker'" in attribute.what
