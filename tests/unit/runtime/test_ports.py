# SPDX-License-Identifier: Apache-2.0
"""A port that was promised is there when the ranks meet."""

import socket
from contextlib import closing

import pytest

from dlrover.python.rl.common.sockets import HeldPort

HERE = "127.0.0.1"


@pytest.fixture
def held():
    port = HeldPort()
    yield port
    port.give_back()


def bound(port, reuse):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    try:
        server.bind((HERE, port))
    except OSError:
        server.close()
        raise
    return closing(server)


def test_nobody_gets_it_but_a_server_that_reuses_addresses(held):
    port = held.take(address=HERE)
    with pytest.raises(OSError, match="in use"):
        bound(port, reuse=False)
    with bound(port, reuse=True) as server:
        server.listen()
        with socket.create_connection((HERE, port), timeout=5):
            pass


def test_torch_meets_at_a_held_port(held):
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.TCPStore(HERE, held.take(address=HERE), 1, is_master=True)
    store.set("met", "yes")
    assert store.get("met") == b"yes"


def test_two_never_hold_the_same(held):
    other = HeldPort()
    wanted = held.take(address=HERE)
    assert other.take((wanted,), HERE) not in (wanted, 0)
    held.give_back()
    assert (held.number, other.take((wanted,), HERE)) == (0, wanted)
    other.give_back()
