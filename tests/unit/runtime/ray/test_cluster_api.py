# SPDX-License-Identifier: Apache-2.0
"""Ending processes of the cluster on their own machine."""

import subprocess
import sys
import time
from pathlib import Path

from dlrover.python.rl.runtime.ray.cluster.api import ActorPlacement, kill_and_wait

SLEEP = ["-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]


def start(name):
    """A process of this name, which the kernel shows a moment after it has begun."""
    process = subprocess.Popen([name, *SLEEP], executable=sys.executable)
    deadline_s = time.monotonic() + 10
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return process


def test_ray_workers_are_dead_afterwards_and_a_reused_pid_is_left_alone():
    worker, other = start("ray::Member"), start("other")
    try:
        kill_and_wait([worker.pid, other.pid, 0])
        assert worker.wait(timeout=5) == -9
        assert other.poll() is None
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()


def test_an_actor_outside_groups_is_kept_off_excluded_nodes():
    assert ActorPlacement({"cpu": 1.0}, excluded=("a", "b")).to_ray()["label_selector"] == {
        "ray.io/node-id": "!in(a,b)"
    }
    assert "label_selector" not in ActorPlacement({"cpu": 1.0}).to_ray()
