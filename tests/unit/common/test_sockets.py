# SPDX-License-Identifier: Apache-2.0
"""Addresses at which a process of a job listens."""

import socket

import pytest
import torch

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.common.sockets import (
    LISTEN_ON_ALL,
    interface_towards,
    is_loopback,
    listening_socket,
    machine_addresses,
)
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.pull import PullTransport


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_listening_socket_at_an_own_address_is_there_only(address):
    with listening_socket(address, 4) as server:
        assert server.getsockname()[0] in ("127.0.0.1", "::1")
        socket.create_connection((address, server.getsockname()[1]), timeout=10).close()


FOREIGN = "198.51.100.1"


def test_listening_socket_at_a_foreign_address_is_a_setting(monkeypatch):
    with pytest.raises(InvalidJob, match=f"{FOREIGN}.*{LISTEN_ON_ALL}=1 to listen on all"):
        listening_socket(FOREIGN, 4)
    monkeypatch.setenv(LISTEN_ON_ALL, "1")
    with listening_socket(FOREIGN, 4) as server:
        assert server.getsockname()[0] == "0.0.0.0"


def test_listening_socket_at_a_taken_port_is_refused():
    with listening_socket("127.0.0.1", 4) as server, pytest.raises(OSError, match="in use"):
        listening_socket("127.0.0.1", 4, server.getsockname()[1])


class Weights:
    version = 1

    def named_weights(self):
        yield "weight", torch.zeros(1)


def test_pull_transport_listens_by_the_same_rule(monkeypatch):
    weights = Weights()

    def offer(address):
        transport = PullTransport(SyncSettings(address=address, timeout_s=10.0))
        return transport, transport.offer(weights)

    with pytest.raises(InvalidJob):
        transport, ticket = offer(FOREIGN)
        transport.send(ticket, weights)
    monkeypatch.setenv(LISTEN_ON_ALL, "1")
    for address, reached in ((FOREIGN, "127.0.0.1"), ("::1", "::1")):
        transport, ticket = offer(address)
        with socket.create_connection((reached, ticket.address["tcp_port"]), timeout=10) as connection:
            connection.sendall(b"0" * 32)
            assert connection.recv(1) == b"-"
        transport.close()


@pytest.mark.skipif(not machine_addresses(), reason="this machine has loopback only")
def test_machine_addresses_can_be_listened_at():
    for address in machine_addresses():
        with listening_socket(address, 4) as server:
            assert not is_loopback(server.getsockname()[0])


def test_interface_towards_a_host_is_named():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") == ""
