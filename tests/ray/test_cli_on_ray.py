"""The command line on a Ray cluster that it starts itself, and on one that is there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import yaml

pytestmark = pytest.mark.ray

CLI = [sys.executable, "-m", "dlrover.python.rl.master.main"]


def job_file(tmp_path, act):
    job = {
        "trainer": {"module": "jobs", "class": "Trainer", "device_type": "CPU", "device_per_node": 4},
        "workload": {"actor": {"module": "jobs", "class": "Worker", "num": 2}},
        "config": {"folder": str(tmp_path), "act": act},
    }
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path.cwd())])}


def descendants(pid):
    """Process ids of everything that ``pid`` started, directly or not."""
    table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    children = {}
    for line in table.splitlines()[1:]:
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, waiting = [], [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def is_alive(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_for(condition, deadline_s):
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < deadline_s, "the deadline passed"
        os.sched_yield()


def test_ctrl_c_stops_cleanly_and_leaves_no_process(tmp_path):
    output = tmp_path / "output.log"
    with open(output, "w") as log:
        # A session of its own, as a terminal would give it: Ctrl-C reaches the whole foreground group.
        command = subprocess.Popen(
            [*CLI, "run", str(job_file(tmp_path, "endless"))],
            cwd=tmp_path,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "toy  step 1" in output.read_text() or command.poll() is not None, 120)
        started = descendants(command.pid)
        assert len(started) > 4
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(timeout=30) == 130
    finally:
        if command.poll() is None:
            command.kill()
            command.wait(timeout=10)
    assert "toy: stopped, interrupted" in output.read_text()
    wait_for(lambda: not any(is_alive(pid) for pid in started), 20)


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
    env = {**environment(), "RAY_gcs_server_request_timeout_seconds": "2", "RAY_gcs_rpc_server_connect_timeout_s": "2"}
    done = subprocess.run([*CLI, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 4, done.stderr
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr
