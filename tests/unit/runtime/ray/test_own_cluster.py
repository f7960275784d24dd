# SPDX-License-Identifier: Apache-2.0
"""Our own Ray cluster: a GCS that is started again, folders of dead clusters, and the end of its processes."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dlrover.python.rl.runtime.ray.cluster import cluster as head
from dlrover.python.rl.runtime.ray.cluster.cluster import GcsKeeper, children_end
from tests.support.commands import wait_for

GCS = "gcs_server"


class Node:
    """The part of Ray's object that the keeper uses. The starts of the GCS fail, die or are "up", as ``starts`` says;
    the last one is repeated."""

    def __init__(self, *starts):
        self.removal_lock = threading.Lock()
        self.tried, self.starts = 0, starts
        self._gcs_address = self._gcs_client = None
        self.begin(is_dead=True)

    def begin(self, is_dead):
        process = SimpleNamespace(poll=lambda: 1 if is_dead else None, returncode=1)
        self.all_processes = {GCS: [SimpleNamespace(process=process)]}

    def start_gcs_server(self):
        self.tried += 1
        start = self.starts[min(self.tried, len(self.starts)) - 1]
        if start == "fails":
            raise OSError("no space left on the device")
        self.begin(is_dead=start == "dies")


@pytest.mark.parametrize(
    ("starts", "options", "tried", "restarts", "end"),
    [
        (["fails"], {"most_in_a_row": 3}, 3, 0, 1),
        (["dies"], {"most_in_a_row": 3}, 3, None, 1),
        (["up"], {}, 1, 1, None),
        (["dies", "dies", "up"], {"most_in_a_row": 1, "quiet_s": 0.0}, 3, 3, None),  # their deaths are far apart
    ],
    ids=["fails", "dies", "up", "far apart"],
)
def test_gcs_keeper_restarts_until_too_many_die_in_a_row(starts, options, tried, restarts, end):
    node = Node(*starts)
    keeper = GcsKeeper(node, **options)
    try:
        wait_for(lambda: keeper._resting.is_set() if end else keeper.restarts == restarts)
        wait_for(lambda: GCS in node.all_processes)
        assert (node.tried, node.all_processes[GCS][0].process.poll()) == (tried, end)
    finally:
        keeper.close()


@pytest.mark.parametrize(("age_s", "is_locked", "stays"), [(3600, False, False), (3600, True, True), (0, False, True)])
def test_folder_of_a_dead_cluster_is_removed_and_no_other(tmp_path, age_s, is_locked, stays):
    folder = tmp_path / "dlrover-ray-1"
    folder.mkdir()
    with (folder / "owner").open("w") as owner:
        if is_locked:
            fcntl.flock(owner, fcntl.LOCK_EX)
        os.utime(folder, (time.time() - age_s,) * 2)
        head._remove_stale(tmp_path)
    assert folder.exists() == stays


def test_own_cluster_has_two_cpus_more_than_its_job_needs():
    assert [repr(head._own({"cpu": 64.0}, cpus)["num_cpus"]) for cpus in (4, None)] == ["4", "66"]


PARENT = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
time.sleep(600)
"""


def test_children_of_a_killed_process_end_with_the_block():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "up\n"
        with children_end(parent.pid, patience_s=0.1):
            parent.kill()
            parent.wait(timeout=10)
        assert parent.stdout.read() == ""  # the child held it open
