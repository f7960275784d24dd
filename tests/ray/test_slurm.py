# SPDX-License-Identifier: Apache-2.0
"""The sbatch script of ``init --cluster slurm``, outside Slurm: ``srun`` and ``scontrol`` on PATH are stand-ins."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dlrover.python.rl.cli.begin import write_skeleton
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.commands import CLI, ROOT, kill_processes, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(500)]

STEPS = 60
RAY = f"{sys.executable} -m ray.scripts.scripts"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURMD_NODENAME=localhost
if [[ $1 == hostname ]]; then echo 127.0.0.1; else exec "$@"; fi
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$LOG"
if [[ $1 == show ]]; then echo localhost; fi
"""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the job, and the programs of a cluster that has one node."""
    monkeypatch.chdir(tmp_path)
    folder = write_skeleton("slurm-test", "slurm").absolute()
    write_tiny_model(folder / "tiny-model")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "dlrover-rl": f'#!/bin/bash\nexec {" ".join(CLI)} "$@"\n',
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
        "ray": f'#!/bin/bash\n[[ $1 == start ]] && set -- "$@" --num-cpus=4\nexec {RAY} "$@"\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    yield folder
    clear(folder)


def batch(desk, job_id, **more):
    """The processes that Slurm starts, in a separate session."""
    paths = {"PATH": f"{desk.parent / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}{os.pathsep}{desk}"}
    job = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    on_loopback = {"PORT": "6391", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    env = {**os.environ, **paths, **job, **on_loopback, "LOG": str(desk / "scontrol.log"), **more}
    with (desk / f"job-{job_id}.log").open("ab") as log:
        options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(["bash", "job.sbatch"], cwd=desk, env=env, **options)


def clear(desk):
    """End every process of an allocation, as Slurm does: whatever has its environment."""
    processes, mark = psutil.process_iter(["environ"]), str(desk / "scontrol.log")
    kill_processes(process.pid for process in processes if (process.info["environ"] or {}).get("LOG") == mark)
    time.sleep(1)


def log_of(desk, job_id):
    return (desk / f"job-{job_id}.log").read_text(errors="replace")


def weights(desk, job_id):
    return (desk / "runs/slurm-test" / f"slurm-{job_id}" / "model" / "model.safetensors").read_bytes()


def steps_of(desk, job_id):
    file = desk / "runs/slurm-test" / f"slurm-{job_id}" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def test_requeued_job_resumes_when_killed_or_out_of_time(desk):
    job = (desk / "job.yaml").read_text()
    (desk / "job.yaml").write_text(job.replace("steps: 20", f"steps: {STEPS}"))
    assert batch(desk, "1").wait(timeout=200) == 0, log_of(desk, "1")
    clear(desk)

    killed = batch(desk, "2")
    wait_for(lambda: steps_of(desk, "2") >= 10, 120)
    clear(desk)
    assert killed.wait(timeout=10) == -signal.SIGKILL

    out_of_time = batch(desk, "2", SLURM_RESTART_COUNT="1")
    wait_for(lambda: steps_of(desk, "2") >= 25, 200)
    out_of_time.send_signal(signal.SIGUSR1)
    assert out_of_time.wait(timeout=120) == 130, log_of(desk, "2")
    assert "requeue 2" in (desk / "scontrol.log").read_text()
    clear(desk)
    done = steps_of(desk, "2")
    assert 25 <= done < STEPS

    last = batch(desk, "2", SLURM_RESTART_COUNT="2")
    assert last.wait(timeout=200) == 0, log_of(desk, "2")
    assert steps_of(desk, "2") == STEPS + 1  # and the evaluation before
    assert weights(desk, "2") == weights(desk, "1")
