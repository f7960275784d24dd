# SPDX-License-Identifier: Apache-2.0
"""``dlrover-rl eval``: the model of a run is evaluated by another run, which trains nothing."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.config.layout import job_to_yaml
from tests.support.example_jobs import EXAMPLES, PAIRS, write_rows
from tests.support.policy_jobs import policy_job, write_inputs

CLI = [sys.executable, "-m", "dlrover.python.rl.cli"]
FIRST_TRAINER = Path(__file__).parents[3] / "examples/first_trainer"


def cli(folder, *arguments, code=0):
    """What the command line says."""
    search = os.pathsep.join([str(Path(__file__).parents[3]), str(Path(__file__).parent)])
    done = subprocess.run(
        [*CLI, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def summary(folder, name):
    return json.loads((folder / "runs" / name / "latest/summary.json").read_text())


@pytest.mark.slow
def test_a_model_that_learned_from_samples_scores_as_at_the_end_of_its_training(tmp_path):
    job = policy_job(tmp_path, "grpo", rollout={"max_new_tokens": 8}, steps=2)
    text = job_to_yaml(job).replace(f"job_dir: {job.job_dir}\n", "")
    (tmp_path / "job.yaml").write_text(text)
    cli(tmp_path, "run", "job.yaml", "--local")
    trained = summary(tmp_path, "grpo")
    cli(tmp_path, "eval", "grpo")
    (tmp_path / "runs/grpo/latest/model").rename(tmp_path / "moved")
    told = summary(tmp_path, "grpo-eval")
    assert told["eval/accuracy"] == trained["eval/accuracy"]
    folder = tmp_path / "runs/grpo-eval/latest"
    assert (folder / "held_out.jsonl").read_text().count("\n") == 4
    assert not (folder / "model").exists() and told["model"] == trained["model"]
    said = cli(tmp_path, "eval", "grpo", code=2)
    assert "has no model yet: pass config.model=FOLDER for another one" in said


@pytest.mark.slow
def test_a_model_that_learned_from_examples_is_measured_on_the_held_out_ones(tmp_path):
    write_inputs(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", EXAMPLES)
    data = f"{{train: {rows}, eval: {rows}}}"
    (tmp_path / "job.yaml").write_text(f"""
name: sft
trainer: {{module: dlrover.python.rl.recipe.sft, class: SFTTrainer, device_type: CPU, device_per_node: 4}}
workload:
  actor: {{module: dlrover.python.rl.recipe.workloads, class: ActorWorkload}}
config: {{model: {tmp_path / "model"}, data: {data}, steps: 3, batch_size: 2, eval_every: 3}}
""")
    cli(tmp_path, "run", "job.yaml", "--local")
    last = json.loads((tmp_path / "runs/sft/latest/metrics.jsonl").read_text().splitlines()[-1])
    cli(tmp_path, "eval", "sft", "config.eval_every=0")
    assert summary(tmp_path, "sft-eval")["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-6)


@pytest.mark.slow
def test_a_policy_is_compared_with_the_model_that_its_training_began_with(tmp_path):
    write_inputs(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", PAIRS)
    (tmp_path / "job.yaml").write_text(f"""
name: dpo
trainer: {{module: dlrover.python.rl.recipe.dpo, class: DPOTrainer, device_type: CPU, device_per_node: 4}}
workload:
  actor: {{module: dlrover.python.rl.recipe.workloads, class: ActorWorkload}}
  reference: {{module: dlrover.python.rl.recipe.workloads, class: ReferenceWorkload}}
config: {{model: {tmp_path / "model"}, data: {{train: {rows}, eval: {rows}}}, steps: 3, batch_size: 2, eval_every: 3}}
""")
    cli(tmp_path, "run", "job.yaml", "--local")
    last = json.loads((tmp_path / "runs/dpo/latest/metrics.jsonl").read_text().splitlines()[-1])
    cli(tmp_path, "eval", "dpo")
    assert summary(tmp_path, "dpo-eval")["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-6)
    assert last["eval/loss"] != pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.slow
def test_a_trainer_of_ones_own_is_refused(tmp_path):
    shutil.copytree(FIRST_TRAINER, tmp_path / "own")
    cli(tmp_path / "own", "run", "job.yaml", "--local")
    said = cli(tmp_path / "own", "eval", "first-trainer", "+config.model=x", code=2)
    assert "first-trainer: its trainer cannot evaluate without training" in said
