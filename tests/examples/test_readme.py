# SPDX-License-Identifier: Apache-2.0
"""The README's code runs as written, and each of its commands is run by some test."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    if line.strip()
]


def block(language):
    (text,) = [text for found, text in BLOCKS if found == language]
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the README's files."""
    made = tmp_path_factory.mktemp("readme")
    (made / "hello.py").write_text(block("python"))
    (made / "hello.yaml").write_text(block("yaml"))
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 9) for b in range(1, 9)]
    (made / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def run(command, folder):
    arguments = command.split()[1:]
    return subprocess.run(
        [sys.executable, "-m", "dlrover.python.rl.master.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_no_setting_is_hidden_as_a_secret(folder):
    job = load_job(folder / "hello.yaml")
    assert job_to_yaml(job, hide_secrets=True) == job_to_yaml(job)


def test_a_trainer_and_a_workload_fit_in_forty_lines():
    assert len(block("python").splitlines()) <= 40


def test_every_command_is_run_somewhere():
    assert COMMANDS == [
        "make demo",  # tests/slow/test_demo.py runs what it runs
        "make test",  # this run
        ".venv/bin/dlrover-rl run examples/arithmetic/grpo.yaml data.train=my.jsonl model=path-or-hub-name",
        "dlrover-rl check hello.yaml",
        "dlrover-rl run hello.yaml --local",
        "dlrover-rl run hello.yaml target=77",
    ]


def test_check_prints_the_plan(folder):
    done = run(COMMANDS[3], folder)
    assert done.returncode == 0, done.stderr
    assert "REFEREE    x2  hello.Referee" in done.stdout


def test_the_trainer_runs_in_one_process(folder):
    done = run(COMMANDS[4], folder)
    assert done.returncode == 0, done.stderr
    assert "hello: finished" in done.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_the_trainer_runs_on_a_ray_of_its_own(folder):
    done = run(COMMANDS[5], folder)
    assert done.returncode == 0, done.stderr
    assert "hello: finished" in done.stderr


@pytest.mark.slow
def test_own_problems_and_model_go_in_with_nothing_else_changed(folder):
    from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

    write_tiny_model(folder / "my-model", hidden=32, layers=2, heads=4, kv_heads=2, max_positions=32)
    command = COMMANDS[2].replace("path-or-hub-name", "./my-model")
    command = command.replace("examples/", f"{ROOT}/examples/")
    done = run(f"{command} data.eval_rows=8 steps=1 prompts_per_step=4 --local", folder)
    assert done.returncode == 0, done.stderr
    assert "model: ./my-model, " in done.stderr
    assert "engines: train fsdp2, rollout torch, on cpu in fp32\n" in done.stderr
    assert "each step: 4 prompts x 8 samples = 32 of up to 4 new tokens; 1 update of 32\n" in done.stderr
    summary = json.loads((folder / "runs/arithmetic-grpo/latest/summary.json").read_text())
    assert summary["held_out_prompts"] == 8
