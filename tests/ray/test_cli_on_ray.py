# SPDX-License-Identifier: Apache-2.0
"""The command line on a Ray cluster that it starts itself, and on one that is there."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import yaml

from tests.ray.durable_jobs import wait_for

pytestmark = pytest.mark.ray

CLI = [sys.executable, "-m", "dlrover.python.rl.cli"]


def job_file(tmp_path, act):
    job = {
        "trainer": {"module": "tests.ray.jobs", "class": "Trainer", "device_type": "CPU", "device_per_node": 4},
        "workload": {"actor": {"module": "tests.ray.jobs", "class": "Worker", "num": 2}},
        "config": {"folder": str(tmp_path), "act": act},
    }
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path.cwd())])}


def descendants(pid):
    """Process ids of everything that ``pid`` started, directly or not."""
    table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    children = {}
    for line in table.splitlines()[1:]:
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    below, waiting = [], [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            below.append(child)
            waiting.append(child)
    return below


def is_alive(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def commands_of(pids):
    """The command lines of processes."""
    rows = []
    for pid in pids:
        with contextlib.suppress(OSError):
            rows.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return rows


class Command:
    """``dlrover-rl`` in a separate session, as in a terminal: Ctrl-C reaches the whole foreground group."""

    def __init__(self, tmp_path, *arguments):
        self.output = tmp_path / "output.log"
        with open(self.output, "w") as log:
            self.process = subprocess.Popen(
                [*CLI, *arguments],
                cwd=tmp_path,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=10)

    def said(self, text):
        return text in self.output.read_text() or self.process.poll() is not None

    def children(self):
        return descendants(self.process.pid)

    def interrupt(self):
        os.killpg(self.process.pid, signal.SIGINT)


MOMENTS = {
    "checking": lambda command: any("inspection" in line for line in commands_of(command.children())),
    "starting Ray": lambda command: any("gcs_server" in line for line in commands_of(command.children())),
    "placed": lambda command: command.said("toy is placed"),
    "running": lambda command: command.said("toy  step 1"),
}


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        *(pytest.param(name, signal.SIGINT, marks=[pytest.mark.slow] * (name != "checking")) for name in MOMENTS),
        pytest.param("running", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_and_sigterm_end_at_any_moment_and_leave_no_process(tmp_path, moment, number):
    with Command(tmp_path, "run", str(job_file(tmp_path, "endless"))) as command:
        wait_for(lambda: MOMENTS[moment](command), 120)
        assert command.process.poll() is None, command.output.read_text()
        started = set(command.children())
        assert started
        (os.killpg if number == signal.SIGINT else os.kill)(command.process.pid, number)
        # Gathered until the end: a child of a command that has ended has lost its parent.
        wait_for(lambda: started.update(command.children()) or command.process.poll() is not None, 60)
        assert command.process.returncode == (130 if number == signal.SIGINT else 143), command.output.read_text()
        assert moment != "running" or command.said("dlrover-rl resume")
    wait_for(lambda: not any(is_alive(pid) for pid in started), 20)
    assert not [line for line in every_command() if str(tmp_path) in line or "dlrover-rl" in line and "toy" in line]


def every_command():
    return commands_of(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def actors_of(job):
    return [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(f"{job}/")
    ]


@pytest.mark.slow
def test_a_second_ctrl_c_stops_waiting_while_the_master_goes_on_stopping(tmp_path, ray_session):
    address = ray.get_runtime_context().gcs_address
    file = job_file(tmp_path, "busy")
    with Command(tmp_path, "run", str(file), "name=twice", "--address", address) as command:
        wait_for(lambda: command.said("twice  step 1"), 120)
        command.interrupt()
        time.sleep(0.2)  # two presses of a key, not one
        command.interrupt()
        wait_for(lambda: command.process.poll() is not None, 60)
        assert command.process.returncode == 130, command.output.read_text()
    wait_for(lambda: not [name for name in actors_of("twice") if name != "twice/master"], 30)
    done = subprocess.run([*CLI, "stop", "twice", "--address", address], capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if "no job named" in done.stderr else 0), done.stderr
    assert not actors_of("twice")


@pytest.mark.slow
def test_a_master_that_dies_comes_back_and_the_run_goes_on(tmp_path, ray_session):
    address = ray.get_runtime_context().gcs_address
    file = job_file(tmp_path, "endless")
    with Command(tmp_path, "run", str(file), "name=survivor", "--address", address) as command:
        wait_for(lambda: command.said("survivor  step 1"), 120)
        master = ray.get_actor("survivor/master", namespace="dlrover-rl")
        os.kill(ray.get(master.__ray_call__.remote(lambda _: os.getpid()), timeout=30), signal.SIGKILL)
        wait_for(lambda: ray.get(master.status.remote(), timeout=60).masters == 2, 60)
        answer = subprocess.run(
            [*CLI, "status", "survivor", "--address", address], capture_output=True, text=True, timeout=60
        )
        assert answer.returncode == 0, answer.stderr
        assert "survivor: running, step" in answer.stdout
        assert "restarts 0" in answer.stdout
        assert command.process.poll() is None, command.output.read_text()
        command.interrupt()
        wait_for(lambda: command.process.poll() is not None, 60)
        assert command.process.returncode == 130, command.output.read_text()
    wait_for(lambda: not actors_of("survivor"), 20)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed for good", "without restarts"])
def test_what_a_master_leaves_that_does_not_come_back_is_ended(tmp_path, ray_session, how):
    address, name = ray.get_runtime_context().gcs_address, how.replace(" ", "-")
    arguments = [str(job_file(tmp_path, "endless")), f"name={name}", "--address", address]
    if how == "without restarts":
        arguments.insert(1, "+master.max_restart=0")
    with Command(tmp_path, "run", *arguments) as command:
        wait_for(lambda: command.said(f"{name}  step 1"), 120)
        master = ray.get_actor(f"{name}/master", namespace="dlrover-rl")
        if how == "without restarts":
            os.kill(ray.get(master.__ray_call__.remote(lambda _: os.getpid()), timeout=30), signal.SIGKILL)
        else:
            ray.kill(master)
        wait_for(lambda: command.process.poll() is not None, 60)
        assert command.process.returncode == 5, command.output.read_text()
        assert "the master is gone" in command.output.read_text()
    wait_for(lambda: not actors_of(name), 20)


def test_status_shows_a_running_job_and_stop_waits_for_its_end_and_removes_the_master(tmp_path, ray_session):
    address = ray.get_runtime_context().gcs_address
    file = job_file(tmp_path, "endless")
    with Command(tmp_path, "run", str(file), "name=stopped", "--address", address) as command:
        wait_for(lambda: command.said("stopped  step 1"), 120)
        answer = subprocess.run(
            [*CLI, "status", "stopped", "--address", address], capture_output=True, text=True, timeout=60
        )
        assert answer.returncode == 0, answer.stderr
        assert "stopped: running, step" in answer.stdout
        done = subprocess.run(
            [*CLI, "stop", "stopped", "--address", address], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "stopped: stopped" in done.stdout or "stopped: ended" in done.stdout
        wait_for(lambda: command.process.poll() is not None, 60)
        assert command.process.returncode == 3, command.output.read_text()
    assert not actors_of("stopped")


@pytest.mark.slow
def test_a_job_runs_by_the_originals_options_on_a_cluster_that_is_there(tmp_path, ray_session):
    address = ray.get_runtime_context().gcs_address
    config = job_file(tmp_path, "steps_only").read_text()
    options = [
        "--job_name",
        "by-options",
        "--rl_config",
        config,
        "--job_max_restart",
        "1",
        "--trainer_max_restart",
        "1",
    ]
    options += ["--workload_max_restart", "{'actor': 1}", "--scheduling_strategy_type", "simple"]
    options += ["--master_cpu", "1", "--master_mem", "64", "--address", address]
    done = subprocess.run(
        [*CLI, "submit", *options], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stderr
    assert "by-options: finished" in done.stderr


def test_a_cluster_that_is_not_there_has_an_exit_code_of_its_own(tmp_path):
    arguments = ["run", str(job_file(tmp_path, "steps_only")), "--address", "127.0.0.1:1"]
    done = subprocess.run(
        [*CLI, *arguments], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 4, done.stderr
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr


def test_the_address_of_a_killed_cluster_does_not_hold_a_command_up(tmp_path):
    """Ray leaves it on the machine, and would try it for minutes."""
    done = subprocess.run(
        [*CLI, "status", "nothing"],
        cwd=tmp_path,
        env=environment() | {"RAY_ADDRESS": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 4, done.stderr
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr
