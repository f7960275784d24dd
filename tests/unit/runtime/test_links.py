"""How the processes of a launched job meet."""

import socket
import threading
import time

import pytest

from dlrover.python.rl.runtime.torchrun import links
from dlrover.python.rl.runtime.torchrun.links import Link, Place, call_in, join


class Board(dict):
    def set(self, key, value):
        self[key] = value


def linked():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    return Heard(ours), theirs


class Heard(Link):
    """Over a socket without TCP's options."""

    def __init__(self, connection):
        self._connection = links.Connection(connection.detach())


@pytest.mark.parametrize("part", [b"", b"\0\0", b"\0\0\0\x30", b"\0\0\0\x30" + b"x" * 20, b"x" * 47])
def test_who_says_a_part_of_a_hello_is_not_waited_for(part):
    link, stray = linked()
    stray.sendall(part)
    begin = time.monotonic()
    assert link.hear(0.05) == b""
    assert time.monotonic() - begin < 5.0
    stray.close()
    assert link.hear(5.0) == b""
    link.close()


def test_a_stray_that_says_half_a_word_does_not_keep_the_others_from_meeting(monkeypatch):
    monkeypatch.setattr(links, "_HELLO_S", 0.05)
    board, found = Board(), []
    meeting = threading.Thread(target=lambda: found.append(call_in(Place(0, 2), board)), daemon=True)
    meeting.start()
    deadline = time.monotonic() + 30
    while Place().board_key not in board:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    port = int(board[Place().board_key][32:])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stray:
        stray.sendall(b"\0\0\0\x30half")
        link = join(Place(1, 2), board)
        meeting.join(30)
    assert list(found[0]) == [1]
    link.close()
    found[0][1].close()
