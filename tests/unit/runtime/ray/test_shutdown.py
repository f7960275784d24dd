# SPDX-License-Identifier: Apache-2.0
"""The end of our own cluster: everything that its node has started ends with it."""

import signal
import subprocess
import sys

import pytest

from dlrover.python.rl.runtime.ray.cluster.cluster import children_end, sigterm_unwinds

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


def test_sigterm_unwinds_what_is_open_whatever_a_library_has_set_meanwhile():
    before, closed = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as ended, sigterm_unwinds() as take_back:
        signal.signal(signal.SIGTERM, lambda number, frame: closed.append("the library's"))
        take_back()
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # it is ending already
            closed.append("ours")
    assert (ended.value.code, closed) == (143, ["ours"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_was_there_before_stays():
    signals = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        with sigterm_unwinds() as take_back:
            take_back()
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signals == [signal.SIGTERM]
