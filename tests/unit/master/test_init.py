# SPDX-License-Identifier: Apache-2.0
"""``dlrover-rl init``: what it writes is a job without errors, which runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.cli.begin import CLUSTERS, write_skeleton
from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.job import check_job

CLI = [sys.executable, "-m", "dlrover.python.rl.master.main"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_is_written_has_the_name_and_no_other(cluster):
    folder = write_skeleton("spelling", cluster)
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert len(texts) >= 4
    assert not any("my-job" in text for text in texts)
    (job,) = folder.rglob("job.yaml") if cluster != "kuberay" else [folder / "base" / "files" / "job.yaml"]
    assert load_job(job).name == "spelling"
    assert all(os.access(path, os.X_OK) for path in folder.rglob("*.s[hb]*"))


@pytest.mark.parametrize("name", ["My_Job", "../out", ""])
def test_a_folder_that_is_no_name_of_a_job_is_not_written(tmp_path, name):
    with pytest.raises(InvalidJob, match="name: "):
        write_skeleton(name, "local")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten():
    Path("spelling").mkdir()
    with pytest.raises(InvalidJob, match="spelling already exists"):
        write_skeleton("spelling", "ray")
    assert list(Path("spelling").iterdir()) == []


@pytest.mark.slow
def test_the_job_has_no_errors_once_there_is_its_model(monkeypatch):
    monkeypatch.chdir(write_skeleton("spelling", "local"))
    write_tiny_model(Path("tiny-model"))
    assert check_job(load_job("job.yaml")).placement.total == {"cpu": 4.0}


@pytest.mark.slow
def test_the_commands_of_its_readme_run():
    for command in ([*CLI, "init", "spelling"], [*CLI, "init", "spelling", "--cluster", "kubray"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    commands = [
        line.split("#")[0].split() for line in Path("spelling/README.md").read_text().splitlines() if line[:4] == "    "
    ]
    assert len(commands) == 5
    for program, *arguments in commands[:4]:
        line = [sys.executable, *arguments] if program == "python" else [*CLI, *arguments]
        done = subprocess.run(line, cwd="spelling", capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert "finished" in done.stderr
