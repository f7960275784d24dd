# SPDX-License-Identifier: Apache-2.0
"""The end of our own cluster: everything that its node has started ends with it."""

import subprocess
import sys

from dlrover.python.rl.runtime.ray.cluster.cluster import children_end

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
