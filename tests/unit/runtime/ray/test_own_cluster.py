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

GCS = "gcs_server"


def wait_for(that):
    deadline_s = time.monotonic() + 30
    while not that():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Node:
    """As much of Ray's object as the keeper uses; ``start`` is what starting the GCS does."""

    def __init__(self, start):
        self.removal_lock = threading.Lock()
        self.all_processes = {GCS: [self.process(dead=True)]}
        self.tried, self._start = 0, start
        self._gcs_address = self._gcs_client = None

    @staticmethod
    def process(dead):
        return SimpleNamespace(process=SimpleNamespace(poll=lambda: 1 if dead else None, returncode=1))

    def start_gcs_server(self):
        self.tried += 1
        self._start(self)


def fails(node):
    raise OSError("no space left on the device")


def dies_again(node):
    node.all_processes[GCS] = [node.process(dead=True)]


def comes_up(node):
    node.all_processes[GCS] = [node.process(dead=False)]


@pytest.mark.parametrize("start", [fails, dies_again])
def test_it_is_tried_several_times_and_then_seen_as_lost(start):
    node = Node(start)
    keeper = GcsKeeper(node, most_in_a_row=3)
    try:
        wait_for(keeper._resting.is_set)
        wait_for(lambda: GCS in node.all_processes)
        assert node.tried == 3
        assert node.all_processes[GCS][0].process.poll() == 1
    finally:
        keeper.close()


def test_one_that_comes_up_is_the_nodes():
    node = Node(comes_up)
    keeper = GcsKeeper(node)
    try:
        wait_for(lambda: keeper.restarts == 1)
        assert node.all_processes[GCS][0].process.poll() is None
    finally:
        keeper.close()
    assert node.tried == 1


def comes_up_the_third_time(node):
    (dies_again if node.tried < 3 else comes_up)(node)


def test_deaths_that_are_far_apart_are_not_in_a_row():
    node = Node(comes_up_the_third_time)
    keeper = GcsKeeper(node, most_in_a_row=1, quiet_s=0.0)
    try:
        wait_for(lambda: keeper.restarts == 3 or keeper._resting.is_set())
        assert (keeper.restarts, node.all_processes[GCS][0].process.poll()) == (3, None)
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


PARENT = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
time.sleep(600)
"""


def test_the_children_of_a_killed_process_are_dead_after_the_block():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "up\n"
        with children_end(parent.pid, patience_s=0.1):
            parent.kill()
            parent.wait(timeout=10)
        assert parent.stdout.read() == ""  # the child held it open
