# SPDX-License-Identifier: Apache-2.0
"""The sbatch script of ``init --cluster slurm``, outside Slurm: ``srun`` and ``scontrol`` on PATH are stand-ins."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from durable_jobs import wait_for
from test_cli_on_ray import CLI, descendants

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.init import write_skeleton

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(500)]

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
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
        "ray": f'#!/bin/bash\nexec {sys.executable} -m ray.scripts.scripts "$@"\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return folder


def batch(desk, job_id, **more):
    """What Slurm starts, in a session of its own."""
    env = {
        **os.environ,
        "PATH": f"{desk.parent / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(desk)]),
        "LOG": str(desk / "scontrol.log"),
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "PORT": "6391",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback
        "RAY_TMPDIR": str(desk.parent),
        **more,
    }
    with (desk / f"job-{job_id}.log").open("ab") as log:
        return subprocess.Popen(
            ["bash", "job.sbatch"], cwd=desk, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def clear(process):
    """What Slurm does to the processes of an allocation that has ended."""
    left = [process.pid, *descendants(process.pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=30)
    time.sleep(1)


def log_of(desk, job_id):
    return (desk / f"job-{job_id}.log").read_text(errors="replace")


def weights(desk, job_id):
    return (desk / "runs/slurm-test" / f"slurm-{job_id}" / "model" / "model.safetensors").read_bytes()


def test_a_job_that_is_killed_and_one_that_is_out_of_time_go_on_when_requeued(desk):
    job = (desk / "job.yaml").read_text()
    (desk / "job.yaml").write_text(job.replace("steps: 20", "steps: 200"))

    alone = batch(desk, "1")
    assert alone.wait(timeout=200) == 0, log_of(desk, "1")
    clear(alone)

    killed = batch(desk, "2")
    wait_for(lambda: "step 60/200" in log_of(desk, "2") or "step 7" in log_of(desk, "2"), 120)
    clear(killed)
    out_of_time = batch(desk, "2")
    wait_for(lambda: log_of(desk, "2").count("step 1") > 2 or out_of_time.poll() is not None, 120)
    out_of_time.send_signal(signal.SIGUSR1)
    code = out_of_time.wait(timeout=120)
    clear(out_of_time)
    if code:
        assert "requeue 2" in (desk / "scontrol.log").read_text()
        last = batch(desk, "2")
        assert last.wait(timeout=200) == 0, log_of(desk, "2")
        clear(last)
    assert weights(desk, "2") == weights(desk, "1")
