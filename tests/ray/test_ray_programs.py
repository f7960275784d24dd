# SPDX-License-Identifier: Apache-2.0
"""Plain Ray programs as roles: a private cluster for each, beside the job's, from outside and from both clusters."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import ray
import yaml

from tests.support.commands import Desk, is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

# It has no line for this package.
PROGRAM = """
import os, time, ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

ray.init()

@ray.remote(num_cpus=1)
class Counter:
    def pid(self):
        return os.getpid()

group = ray.util.placement_group([{"CPU": 1}] * 2)
ray.get(group.ready())
counters = [Counter.options(scheduling_strategy=In(group)).remote() for _ in range(2)]
pids = ray.get([counter.pid.remote() for counter in counters])
free = ray.available_resources().get("CPU", 0)
print("start", os.environ["RESTART_COUNT"], "nodes", len(ray.nodes()), "cpus", ray.cluster_resources()["CPU"], "of",
      free, "at", os.environ["RAY_ADDRESS"], "pid", os.getpid(), "actors", *pids, "why", os.environ["RESTART_REASON"],
      flush=True)
while not os.path.exists("end"):
    time.sleep(0.1)
ray.get([counter.pid.remote() for counter in counters])
"""
LINE = re.compile(r"start (\d) nodes 1 cpus 2\.0 of 0(?:\.0)? at (\S+) pid (\d+) actors (\d+) (\d+) why (.*)")


def marked(mark):
    """The processes that have inherited the mark of the role."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def start_of(log, number):
    """The line of one start: address, pid, actors' pids, reason."""
    lines = LINE.findall(log.read_text()) if log.exists() else []
    return next((line[1:] for line in lines if line[0] == str(number)), None)


def folder_of(mark):
    """The folder of the cluster's files: the first argument of its supervisor."""
    commands = [process.cmdline() for process in marked(mark)]
    (folder,) = {Path(command[3]) for command in commands if "run_beside_ray" in " ".join(command[:3])}
    return folder


def test_ray_program_keeps_to_its_reservation_and_comes_back(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    beside = """sh -c 'echo beside at $RAY_ADDRESS; until [ -e end ]; do sleep 0.2; done'"""
    env = {"MARK": tmp_path.name}
    program = {"command": ["python", "program.py"], "ray": True, "resource": {"cpu": 2}, "env": env}
    roles = {"train": program, "serve": {"command": beside}}
    trainer = {"device_type": "CPU", "device_per_node": 4}
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump({"name": "ray-programs", "trainer": trainer, "roles": roles, "restart": {"backoff_s": 0.0}})
    )
    outer, before = ray.get_runtime_context().gcs_address, len(ray._private.state.jobs())
    with Desk(tmp_path, outer) as desk, desk.start("run", "job.yaml") as command:
        wait_for(lambda: list(tmp_path.glob("runs/ray-programs/2*/logs/TRAIN-0.log")) or command.poll() is not None)
        (log,) = tmp_path.glob("runs/ray-programs/2*/logs/TRAIN-0.log")
        address, pid, *_ = wait_for(lambda: start_of(log, 0) or command.poll() is not None)
        assert address != outer
        assert len(ray._private.state.jobs()) == before + 1  # the command's connection alone
        assert len(ray.nodes()) == 1
        first = folder_of(tmp_path.name)
        assert first.is_dir()
        os.kill(int(pid), signal.SIGKILL)
        *_, reason = wait_for(lambda: start_of(log, 1) or command.poll() is not None)
        assert "ended by signal 9" in reason
        (worker,) = [each for each in marked(tmp_path.name) if " ".join(each.cmdline()).startswith("ray::Script")]
        remaining, second = marked(tmp_path.name), folder_of(tmp_path.name)
        worker.kill()
        wait_for(lambda: not any(is_alive(each.pid) for each in remaining), 20)
        *_, reason = wait_for(lambda: start_of(log, 2) or command.poll() is not None)
        assert "process_died" in reason
        third = folder_of(tmp_path.name)
        assert [folder.exists() for folder in (first, second, third)] == [False, False, True]
        (tmp_path / "end").touch()
        output = command.end()
    assert "beside at local" in output, output
    wait_for(lambda: not marked(tmp_path.name), 20)
    assert not third.exists()
