# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a killable child process."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dlrover.python.rl.environment.sandbox.child_process import ChildEnded, ChildProcess, pack_call


class Owner:
    pass


OWNER = Owner()


class Waiting:
    """Is ready, and waits for the end of its parent."""

    def __init__(self, **ready):
        self.ready = ready

    def serve(self, channel):
        channel.receive()


class Slow(Waiting):
    def serve(self, channel):
        """Take a little of the request now and then."""
        while True:
            channel._incoming.raw.read(1000)
            threading.Event().wait(0.01)


class Disconnected(Waiting):
    def serve(self, channel):
        """Close the connection and live on."""
        channel.receive()
        os.closerange(3, 1000)
        threading.Event().wait()


def claim_pid(pid):
    """Load a child that claims to be another process."""
    return Waiting(pid=pid)


def leave_orphan():
    return Waiting(orphan=subprocess.Popen(["sleep", "987654"], start_new_session=True).pid)


def refuse():
    raise RuntimeError("out of stock")


def start(load, *arguments):
    child = ChildProcess(OWNER, load, list(arguments), None, 1000)
    return child, child.ready.result(timeout=60)


def test_request_that_a_child_takes_slowly_does_not_hold_up_its_caller():
    child, _ = start(Slow)
    try:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            child.submit("call", bytes(8_000_000)).result(timeout=0.5)
        assert time.monotonic() - began_s < 5.0
    finally:
        child.end()


def test_request_to_a_child_that_has_ended_fails_with_the_reason():
    child, _ = start(Waiting)
    child.end("it was late")
    assert child._connection.fileno() == -1
    with pytest.raises(ChildEnded, match="it was late"):
        child.submit("call", b"too late").result(timeout=1.0)


def test_child_that_cannot_be_loaded_says_why():
    child, reply = start(refuse)
    assert reply["error"] == "raised RuntimeError: out of stock"
    assert "in refuse" in reply["traceback"]
    child.end()


def test_the_group_that_a_child_names_as_its_own_is_not_killed():
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    try:
        child, _ = start(claim_pid, other.pid)
        assert child.pid not in (0, other.pid)
        child.end()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    finally:
        other.kill()
        other.wait()


def test_child_that_closes_its_connection_is_reported_and_killed():
    child, _ = start(Disconnected)
    try:
        with pytest.raises(ChildEnded, match="it closed its connection"):
            child.submit(*pack_call("any")).result(timeout=10.0)
        assert child._process.wait(5.0)
    finally:
        child.end()


def test_a_child_ends_with_its_owner_even_if_that_is_in_a_cycle():
    owner = Owner()
    owner.itself, owner.child = owner, ChildProcess(owner, Waiting, [], None, 1000)
    owner.child.ready.result(timeout=60)
    process = owner.child._process
    del owner
    gc.collect()
    process.wait(10.0)


def test_what_a_child_has_started_ends_when_its_first_process_is_killed():
    """As a worker of Ray kills the processes that it has started, when it ends."""
    child, reply = start(leave_orphan)
    orphan = Path(f"/proc/{reply['orphan']}")
    try:
        os.kill(child._process.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 10.0
        while orphan.exists() and time.monotonic() < deadline_s:
            threading.Event().wait(0.05)
        assert not orphan.exists()
    finally:
        child.end()
