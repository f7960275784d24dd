# SPDX-License-Identifier: Apache-2.0
"""Processes of an engine that fails to be made, and where those of one listen."""

import os
import socket
import time

import pytest
import torch.distributed as dist

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.sockets import interface_towards, machine_addresses
from dlrover.python.rl.engine.api.base import Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.ranks import Ranks, resolve_device, serve_store, use_interface_towards
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.processes import run


@pytest.mark.slow
def test_ranks_of_an_engine_that_was_refused_can_meet_in_another(tmp_path):
    model = write_tiny_model(tmp_path / "T", hidden=32, layers=1)
    assert run(2, second_try, model) == [2, 2]


def second_try(rank, world_size, port, model):
    if rank == 0:  # the store of the first try is still there when the other rank comes again
        close = Ranks.close
        Ranks.close = lambda ranks: (time.sleep(1.0), close(ranks))
    rendezvous = Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=60)
    with pytest.raises(EngineError, match="2 ranks cannot be divided"):
        Fsdp2TrainEngine(model, None, TrainSettings(parallel=ParallelSizes(tensor_parallel_size=4)), rendezvous)
    assert not dist.is_initialized()
    engine = Fsdp2TrainEngine(model, None, TrainSettings(), rendezvous)
    found = engine.layout.world_size
    engine.close()
    return found


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    assert [resolve_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]


needs_address = pytest.mark.skipif(not machine_addresses(), reason="this machine has loopback only")


@pytest.fixture
def interfaces(monkeypatch):
    """What gloo and nccl are told, from nothing."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda: (os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"))


def test_ranks_that_meet_on_loopback_listen_there_only(interfaces):
    use_interface_towards("127.0.0.1")
    assert interfaces() == ("lo", "lo")


@needs_address
def test_ranks_that_meet_beyond_loopback_use_the_interface_of_that_address(interfaces):
    address = machine_addresses()[0]
    use_interface_towards(address)
    assert interfaces() == (interface_towards(address), None) and interfaces()[0] != "lo"


def test_an_interface_that_somebody_has_chosen_stays(interfaces, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth8")
    use_interface_towards("127.0.0.1")
    assert interfaces() == ("eth7", "eth8")


@needs_address
def test_a_store_is_at_its_own_address_alone():
    """Torch's own would be at all of them."""
    store = serve_store("127.0.0.1", 0, timeout_s=10.0)
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", store.port, is_master=False).get("key") == b"value"
    for address in machine_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, store.port), timeout=10)
