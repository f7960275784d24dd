# SPDX-License-Identifier: Apache-2.0
"""The README's code runs as written, and each of its commands is run by some test."""

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
    (text,) = [text for block_language, text in BLOCKS if block_language == language]
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the README's files."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "hello.py").write_text(block("python"))
    (folder / "hello.yaml").write_text(block("yaml"))
    return folder


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
        "source .venv/bin/activate",
        "dlrover-rl init my-job && cd my-job",  # tests/unit/deploy/test_deploy_files.py runs these
        "python -m dlrover.python.rl.recipe.tiny --out tiny-model",
        "dlrover-rl check job.yaml",
        "dlrover-rl run job.yaml --local steps=2",
        "dlrover-rl run job.yaml",
        "dlrover-rl check hello.yaml",
        "dlrover-rl run hello.yaml --local",
        "dlrover-rl run hello.yaml target=77",
    ]


def test_check_prints_the_plan(folder):
    done = run(COMMANDS[8], folder)
    assert done.returncode == 0, done.stderr
    assert "REFEREE    x2  hello.Referee" in done.stdout


def test_the_trainer_runs_in_one_process(folder):
    done = run(COMMANDS[9], folder)
    assert done.returncode == 0, done.stderr
    assert "hello: finished" in done.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_the_trainer_runs_on_a_ray_of_its_own(folder):
    done = run(COMMANDS[10], folder)
    assert done.returncode == 0, done.stderr
    assert "hello: finished" in done.stderr
