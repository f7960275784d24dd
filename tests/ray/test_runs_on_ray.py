# SPDX-License-Identifier: Apache-2.0
"""The folders of runs on clusters, which are shared or lost: real processes, from outside."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import answers, kill_processes, processes_below
from tests.support.held_job import Desk, wait_for
from tests.support.processes import free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    with Desk(tmp_path) as desk:
        yield desk


def in_use(desk, where):
    return f"in use by run {desk.owner('out')['run']} of 'held' (Ray, {where}on"


@pytest.mark.slow
def test_runs_on_two_clusters_and_in_one_process_are_apart(desk):
    first, second = desk.held("out"), desk.start("run", "job.yaml")
    output = desk.run("run", "job.yaml", "--local", "job_dir=out", code=2)
    assert in_use(desk, f"process {first.pid} ") in output
    desk.run("run", "job.yaml", "--local")
    second.end()
    folders = [path for path in (desk.folder / "runs/held").iterdir() if not path.is_symlink()]
    assert [desk.steps(folder) for folder in folders] == [[1, 2, 3, 4, 5, 6]] * 2
    desk.release("out")
    first.end()
    assert desk.steps("out") == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["--ray", "--local"])
def test_run_resumes_after_its_last_step_without_its_cluster(desk, where):
    process = desk.held("out")
    process.kill()
    process.wait(60)
    output = desk.run("resume", "out", where, "hold=0")
    assert "after step 3" in output
    assert desk.steps("out") == [1, 2, 3, 4, 5, 6]
    assert not list((desk.folder / "memory").rglob("step-*"))


@pytest.mark.slow
def test_master_on_a_shared_cluster_owns_the_folder(desk, ray_session):
    first = desk.held("out", "--address", "auto")
    assert in_use(desk, "") in desk.run("run", "job.yaml", "--local", "job_dir=out", code=2)
    desk.release("out")
    first.end()
    wait_for(lambda: desk.owner("out")["state"] == "finished")
    (start,) = [json.loads(line) for line in (desk.folder / "out/environment.jsonl").read_text().splitlines()]
    assert "job.yaml" in start["command"] and start["runtime"] == "Ray"
    assert start["devices"]["nodes"] == 1 and start["devices"]["cpus"] >= 1
    steps = re.findall(
        r"^[-\d]+ \d\d:\d\d:\d\d step (\d)/6", (desk.folder / "out/logs/trainer.log").read_text(), re.MULTILINE
    )
    assert steps == list("123456")


def assert_resumes(desk, command):
    """It does the steps after the three that were committed, to the end, each step once."""
    wait_for(lambda: (desk.folder / "out/waiting").exists() or command.poll() is not None)
    desk.release("out")
    assert "resuming after step 3" in command.end()
    assert desk.steps("out") == [1, 2, 3, 4, 5, 6]


AGENTS = [pytest.param(f"ray::{name}", marks=pytest.mark.slow) for name in ("DashboardAgent", "RuntimeEnvAgent")]


@pytest.mark.parametrize("victim", ["raylet/raylet", *AGENTS])
def test_run_resumes_when_a_process_of_its_cluster_dies(desk, victim):
    command = desk.held("out")
    processes = processes_below(command.pid)
    (desk.folder / "out/waiting").unlink()
    (pid,) = [pid for pid, line in processes.items() if victim in line.split(" ")[0]]
    os.kill(pid, signal.SIGKILL)
    assert_resumes(desk, command)
    assert desk.owner("out")["state"] == "finished"
    assert not [line for pid, line in processes.items() if Path(f"/proc/{pid}/cmdline").exists()]
    assert not list((desk.folder / "memory").rglob("step-*"))


@pytest.fixture
def foreign():
    """A function that starts a cluster, each time at the same port, and returns a function that ends it."""
    port, started = free_port(), []

    def start():
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=6"]
        command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        env = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
        started.append(process)

        def end():
            kill_processes([process.pid, *processes_below(process.pid)])
            process.wait(20)

        return end

    yield f"127.0.0.1:{port}", start
    for process in started:
        assert process.poll() is not None


@pytest.mark.slow
def test_supervised_run_resumes_on_the_next_cluster(desk, foreign):
    address, start = foreign
    end = start()
    try:
        wait_for(lambda: answers(address))
        command = desk.held("out", "--address", address, "--supervise", "+liveness={lease_s: 6}")
        (desk.folder / "out/waiting").unlink()
        end()
        end = start()
        assert_resumes(desk, command)
    finally:
        end()
