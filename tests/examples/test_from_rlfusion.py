# SPDX-License-Identifier: Apache-2.0
"""RLFusion's README, whose snippets run as they are but for the names of package and models."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "docs" / "guides" / "from_rlfusion"
DEADLINE_S = 250.0


def ran(script, tmp_path):
    """Run a script of the guide with a tiny model in the place of its models; what it printed."""
    write_tiny_model(tmp_path / "tiny", hidden=32, layers=2)
    code, count = re.subn(r'"Qwen/[^"]+"', repr(str(tmp_path / "tiny")), (SCRIPTS / script).read_text(encoding="utf-8"))
    assert count
    (tmp_path / script).write_text(code, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_readme_blocks_twice_in_one_folder_train_and_save(tmp_path):
    for number, script in enumerate(["sft.py", "grpo.py", "distillation.py"] * 2, 1):
        ran(script, tmp_path)
        lines = (tmp_path / "outputs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [step for line in lines if (step := json.loads(line)["step"])] == [1, 2]
        for name in ("step_2", "final"):
            assert AutoModelForCausalLM.from_pretrained(tmp_path / "outputs" / name)
        assert len(list(tmp_path.glob("outputs/runs/*/2*"))) == number


@pytest.mark.slow
def test_the_evaluator_writes_its_files(tmp_path):
    assert "'num_samples': 8" in ran("evaluate.py", tmp_path)
    lines = (tmp_path / "outputs/evaluation/results.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 8
