# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a killable child process."""

import threading
import time

from dlrover.python.rl.environment.sandbox.child_process import ChildProcess


def serve_nothing(channel):
    """A child that is ready and then takes a little of its request now and then."""
    channel.send("ready", {})
    while True:
        channel._connection.recv(1000)
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
