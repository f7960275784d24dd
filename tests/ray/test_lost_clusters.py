# SPDX-License-Identifier: Apache-2.0
"""Clusters that are lost under a run, from outside: the run resumes by itself after its last committed step."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.held_job import Desk, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    desk = Desk(tmp_path)
    yield desk
    desk.kill_all()


def rows_of_processes():
    """Process id, parent and command line of all processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            yield int(folder.name), parent, (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue


def below(pid):
    """The command lines of all descendants of a process."""
    family, above, rows = {}, {pid}, list(rows_of_processes())
    while above:
        children = {child: line for child, parent, line in rows if parent in above}
        family |= children
        above = set(children)
    return family


def assert_it_goes_on(desk, process):
    """After the three steps that were committed, to the end, each step once."""
    wait_for(lambda: (desk.folder / "out/waiting").exists() or process.poll() is not None)
    desk.release("out")
    output = desk.end(process)
    assert process.returncode == 0, output
    assert "resuming after step 3" in output
    assert desk.steps("out") == [1, 2, 3, 4, 5, 6]


def kill(processes, name):
    (pid,) = [pid for pid, line in processes.items() if name in line.split(" ")[0]]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "victim",
    [
        "raylet/raylet",
        pytest.param("ray::DashboardAgent", marks=pytest.mark.slow),
        pytest.param("ray::RuntimeEnvAgent", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_by_itself_when_a_process_of_its_cluster_dies(desk, victim):
    process = desk.held("out")
    processes = below(process.pid)
    (desk.folder / "out/waiting").unlink()
    kill(processes, victim)
    assert_it_goes_on(desk, process)
    assert desk.owner("out")["state"] == "finished"
    assert not [line for pid, line in processes.items() if Path(f"/proc/{pid}/cmdline").exists()]
    assert not list((desk.folder / "memory").rglob("step-*"))


@pytest.fixture
def foreign():
    """A function that starts a cluster, each time at the same port; what it returns ends the cluster."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []

    def start():
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=6"]
        command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        )
        started.append(process)

        def end():
            everything = below(process.pid)
            for pid in (process.pid, *everything):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait(20)

        return end

    yield f"127.0.0.1:{port}", start
    for process in started:
        assert process.poll() is not None


@pytest.mark.slow
def test_a_supervised_run_goes_on_when_another_cluster_has_the_place_of_its_own(desk, foreign):
    address, start = foreign
    end = start()
    try:
        wait_for(lambda: answers(address))
        process = desk.held("out", "--address", address, "--supervise", "+liveness={lease_s: 6}")
        (desk.folder / "out/waiting").unlink()
        end()
        end = start()
        assert_it_goes_on(desk, process)
    finally:
        end()


def answers(address):
    host, _, port = address.partition(":")
    with closing(socket.socket()) as probe:
        return not probe.connect_ex((host, int(port)))


def test_what_watches_a_cluster_cannot_be_detached(desk):
    output = desk.run("run", "job.yaml", "--supervise", "--detach", "--address", "127.0.0.1:1", code=2)
    assert "--supervise: cannot be used with --detach" in output
