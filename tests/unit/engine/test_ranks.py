# SPDX-License-Identifier: Apache-2.0
"""Ranks as a grid, how they meet, and at which addresses they listen."""

import os
import socket
import time

import pytest
import torch.distributed as dist

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.sockets import interface_towards, machine_addresses
from dlrover.python.rl.engine.api.base import Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.ranks import Ranks, resolve_device, serve_store, use_interface_towards
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.processes import free_port, run


def test_ranks_left_over_shard_the_parameters():
    layout = Layout.of(16, ParallelSizes(ddp_size=2, tensor_parallel_size=2))
    assert layout == Layout(ddp=2, shard=4, tensor=2)
    assert (layout.world_size, layout.data_parallel_size) == (16, 8)


@pytest.mark.feature(51)
def test_sizes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(EngineError, match="6 ranks cannot be divided by ddp_size 2 x tensor_parallel_size 2 = 4"):
        Layout.of(6, ParallelSizes(ddp_size=2, tensor_parallel_size=2))


def test_consecutive_ranks_form_a_replica_at_different_places():
    sizes = ParallelSizes(ddp_size=2, tensor_parallel_size=2, context_parallel_size=3, pipeline_parallel_size=2)
    layout = Layout.of(48, sizes)
    places = [layout.coordinates(rank) for rank in range(48)]
    assert len({place.shape for place in places}) == 48
    replicas = [(place.ddp, place.shard) for place in places]
    assert replicas == sorted(replicas)
    assert places[1] == Layout(0, 0, 0, 0, 1)
    assert [replicas.count(replica) for replica in set(replicas)] == [sizes.replica_size] * 4


# -- meeting ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_alone_at_the_meeting_place_is_an_error():
    port = free_port()
    with pytest.raises(EngineError, match=f"rank 0 of 2 did not meet the others at 127.0.0.1:{port}"):
        Ranks.connect(Rendezvous(0, 2, "127.0.0.1", port, timeout_s=1))


@pytest.mark.slow
def test_ranks_of_a_refused_engine_can_meet_in_another(tmp_path):
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
    engine.close()
    return engine.layout.world_size


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    assert [resolve_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]


needs_address = pytest.mark.skipif(not machine_addresses(), reason="this machine has loopback only")


@pytest.fixture
def interfaces(monkeypatch):
    """A function that returns the interfaces of gloo and nccl."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda: (os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"))


def test_ranks_that_meet_on_loopback_listen_there_only(interfaces):
    use_interface_towards("127.0.0.1")
    assert interfaces() == ("lo", "lo")


@needs_address
def test_ranks_that_meet_elsewhere_use_that_interface(interfaces):
    address = machine_addresses()[0]
    use_interface_towards(address)
    assert interfaces() == (interface_towards(address), None) and interfaces()[0] != "lo"


def test_a_chosen_interface_stays(interfaces, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth8")
    use_interface_towards("127.0.0.1")
    assert interfaces() == ("eth7", "eth8")


@needs_address
def test_a_store_is_at_one_address_alone():
    """Torch's own would be at all of them."""
    store = serve_store("127.0.0.1", 0, timeout_s=10.0)
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", store.port, is_master=False).get("key") == b"value"
    for address in machine_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, store.port), timeout=10)
