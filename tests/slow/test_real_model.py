# SPDX-License-Identifier: Apache-2.0
"""The example with a real model converts, trains, and finds its accuracy again with ``transformers`` alone."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-real_model" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="make example NAME=real_model makes its environment"),
]


def test_real_model_trains_three_steps(tmp_path):
    command = [str(ENVIRONMENT), str(ROOT / "examples/real_model/run.py"), "steps=3", "data.eval_rows=40"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads((tmp_path / "build/real_model/seed-0.json").read_text(encoding="utf-8"))
    assert list(summary["accuracy"]) == ["0", "3"]
    assert len(summary["rewards"]) == 3
    assert abs(summary["accuracy by transformers alone"] - summary["accuracy"]["3"]) <= 0.1  # of 40 answers
    assert len(summary["samples"]) == 20
