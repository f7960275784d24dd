# SPDX-License-Identifier: Apache-2.0
"""Processes of an engine that fails to be made."""

import time

import pytest
import torch.distributed as dist
from processes import run

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.ranks import Ranks, resolve_device
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model


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
