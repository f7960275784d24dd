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

from dlrover.python.rl.environment.sandbox.child_process import ChildEnded, ChildProcess, pack_request


def serve_nothing(channel):
    """A child that is ready and then takes a little of its request now and then."""
    channel.send("ready", {})
    while True:
        channel._incoming.raw.read(1000)
        threading.Event().wait(0.01)


def test_a_request_that_a_child_takes_slowly_is_given_up_at_its_deadline():
    child = ChildProcess(serve_nothing, [], None, 1000, send_timeout_s=0.5)
    try:
        child.ready.result(timeout=60)
        began_s = time.monotonic()
        child.send(bytes(8_000_000))
        assert time.monotonic() - began_s < 5.0
    finally:
        child.end()


def test_a_request_to_a_child_that_has_ended_is_dropped():
    child = ChildProcess(serve_nothing, [], None, 1000)
    child.ready.result(timeout=60)
    child.end()
    child._reader.join(10)  # it closes the connection
    assert child._connection.fileno() == -1
    child.send(b"too late")


def serve_with_pid(channel, pid):
    """A child that claims to be another process."""
    channel.send("ready", {"pid": pid})
    channel.receive()


def test_the_group_that_a_child_names_as_its_own_is_not_killed():
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    try:
        child = ChildProcess(serve_with_pid, [other.pid], None, 1000)
        child.ready.result(timeout=60)
        assert child.pid not in (0, other.pid)
        child.end()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    finally:
        other.kill()
        other.wait()


def serve_without_connection(channel):
    """A child that closes its connection and lives on."""
    channel.send("ready", {})
    channel.receive()
    os.closerange(3, 1000)
    threading.Event().wait()


def test_a_child_that_closes_its_connection_and_lives_is_reported_and_killed_at_once():
    child = ChildProcess(serve_without_connection, [], None, 1000)
    try:
        child.ready.result(timeout=60)
        answer = child.begin("call")
        child.send(pack_request("call", "any", ()))
        with pytest.raises(ChildEnded, match="it closed its connection"):
            answer.result(timeout=3.0)
        assert child._process.wait(5.0)
    finally:
        child.end()


class Owner:
    pass


def serve_until_the_end(channel):
    channel.send("ready", {})
    channel.receive()


def test_a_child_ends_with_its_owner_even_if_that_is_in_a_cycle():
    owner = Owner()
    owner.itself, owner.child = owner, ChildProcess(serve_until_the_end, [], None, 1000)
    owner.child.end_with(owner)
    owner.child.ready.result(timeout=60)
    process = owner.child._process
    del owner
    gc.collect()
    process.wait(10.0)


def serve_with_orphan(channel):
    orphan = subprocess.Popen(["sleep", "987654"], start_new_session=True)
    channel.send("ready", {"orphan": orphan.pid})
    channel.receive()


def test_what_a_child_has_started_ends_when_its_first_process_is_killed():
    """As a worker of Ray kills the processes that it has started, when it ends."""
    child = ChildProcess(serve_with_orphan, [], None, 1000)
    orphan = Path(f"/proc/{child.ready.result(timeout=60)['orphan']}")
    try:
        os.kill(child._process.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 10.0
        while orphan.exists() and time.monotonic() < deadline_s:
            threading.Event().wait(0.05)
        assert not orphan.exists()
    finally:
        child.end()
