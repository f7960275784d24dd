# SPDX-License-Identifier: Apache-2.0
"""Where a process of a job listens, whatever the others call its machine."""

import socket

import pytest

from dlrover.python.rl.common.sockets import interface_towards, listening_socket
from dlrover.python.rl.engine.weight_sync.pull import PublishedVersions, WeightServer


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_at_its_own_address_it_listens_there_alone(address):
    with listening_socket(address, 4) as server:
        assert server.getsockname()[0] in ("127.0.0.1", "::1")
        socket.create_connection((address, server.getsockname()[1]), timeout=10).close()


def test_at_an_address_of_a_gateway_it_listens_at_all_of_the_machines():
    with listening_socket("192.0.2.1", 4) as server:
        assert server.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize(("address", "reached"), [("192.0.2.1", "127.0.0.1"), ("::1", "::1")])
def test_weights_are_handed_out_there_too(address, reached):
    server = WeightServer(PublishedVersions(), address, timeout_s=10.0)
    with socket.create_connection((reached, server.tcp_port), timeout=10) as connection:
        connection.sendall(b"0" * 32)
        assert connection.recv(1) == b"-"
    server.close()


def test_the_interface_towards_a_host_is_the_one_that_packets_leave_by():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") == ""
