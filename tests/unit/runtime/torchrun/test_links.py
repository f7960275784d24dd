# SPDX-License-Identifier: Apache-2.0
"""How the processes of a launched job meet."""

import socket
import threading
import time

import pytest

from dlrover.python.rl.runtime.torchrun import links
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv, Link, accept_all, join


class Store(dict):
    def set(self, key, value):
        self[key] = value


def linked():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    return PlainLink(ours), theirs


class PlainLink(Link):
    """Over a socket without TCP's options."""

    def __init__(self, connection):
        self._connection = links.Connection(connection.detach())


@pytest.mark.parametrize("part", [b"", b"\0\0", b"\0\0\0\x30", b"\0\0\0\x30" + b"x" * 20, b"x" * 47])
def test_an_incomplete_hello_is_not_waited_for(part):
    link, stray = linked()
    stray.sendall(part)
    begin = time.monotonic()
    assert link.receive_hello(0.05) == b""
    assert time.monotonic() - begin < 5.0
    stray.close()
    assert link.receive_hello(5.0) == b""
    link.close()


def test_a_stray_connection_does_not_keep_the_ranks_from_meeting(monkeypatch):
    monkeypatch.setattr(links, "_HELLO_S", 0.05)
    store, meetings = Store(), []
    meeting = threading.Thread(target=lambda: meetings.append(accept_all(LaunchEnv(0, 2), store)), daemon=True)
    meeting.start()
    deadline = time.monotonic() + 30
    while LaunchEnv().store_key not in store:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    port = int(store[LaunchEnv().store_key][32:])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stray:
        stray.sendall(b"\0\0\0\x30half")
        link = join(LaunchEnv(1, 2), store)
        meeting.join(30)
    assert list(meetings[0]) == [1]
    link.close()
    meetings[0][1].close()
