# SPDX-License-Identifier: Apache-2.0
"""A run that goes on with fewer steps than it has taken: what they have left in its files stays."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.trainers.recipe_trainer import RecipeTrainer
from dlrover.python.rl.trainer.port import RestartInfo

CLI = [sys.executable, "-m", "dlrover.python.rl.cli"]


@pytest.mark.parametrize(("taken", "total", "begun"), [(6, 3, 7), (3, 3, 4), (0, 3, 4)])
def test_the_log_goes_on_after_the_last_step_that_was_taken(taken, total, begun):
    log, said = [], []
    trainer = SimpleNamespace(
        time_metrics=dict,
        steps=lambda total: iter(()),
        restart_info=RestartInfo(step=taken),
        announce=said.append,
        begin_log=log.append,
    )
    assert list(RecipeTrainer.logged_steps(trainer, total)) == []
    assert (log, trainer.last_step, len(said)) == ([begun], begun - 1, taken > total)


@pytest.mark.slow
def test_no_row_is_lost(tmp_path):
    write_tiny_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 8)

    def run(*arguments):
        done = subprocess.run([*CLI, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    job = {
        "trainer": {"module": "dlrover.python.rl.recipe.sft", "class": "SFTTrainer", "device_type": "CPU"},
        "workload": {"actor": {"module": "dlrover.python.rl.recipe.workloads", "class": "ActorWorkload"}},
        "config": {"model": "model", "data": {"train": "data.jsonl"}, "batch_size": 2, "steps": 4},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    run("run", "job.yaml", "--local", "job_dir=out")
    rows = (tmp_path / "out/metrics.jsonl").read_text()
    assert "adds none" in run("resume", "out", "--local", "steps=2")
    assert (tmp_path / "out/metrics.jsonl").read_text() == rows
