# SPDX-License-Identifier: Apache-2.0
"""The processes of vLLM, without vLLM: their options and devices, and the weights that they are given."""

import gc
import json
import os
import pickle
from dataclasses import asdict, replace

import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, read_options, validate_engine
from dlrover.python.rl.engine.api.weights import DOWN, UP, Adapters, take_snapshot, verify_snapshot
from dlrover.python.rl.engine.model.ranks import device_environment
from dlrover.python.rl.engine.vllm import VllmOptions
from dlrover.python.rl.engine.vllm.sharing import SharedSnapshot, share_weights
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from tests.support.sync_sides import publish

FIXED = ["model", "tensor_parallel_size", "enable_sleep_mode", "weight_transfer_config", "moe_backend"]
FIXED += ["speculative_config", "logprobs_mode", "logits_processors"]


@pytest.mark.parametrize("name", FIXED)
def test_fixed_argument_of_vllm_is_refused_by_name(name):
    options = {"engine_args": {name: "any", "max_num_batched_tokens": 64}}
    with pytest.raises(EngineError, match=rf"^backend: arguments of vLLM .* cannot be given: {name}, got"):
        read_options(VllmOptions, options)
    (error,) = validate_engine(ROLLOUT_ENGINES, "vllm", options, "config.engine.rollout", runs_here=False)
    assert (error.where, f"cannot be given: {name}" in error.what) == ("config.engine.rollout_options", True)


def test_other_arguments_of_vllm_are_passed_on():
    options = {"engine_args": {"max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1}}
    assert read_options(VllmOptions, options).engine_args == options["engine_args"]


@pytest.mark.parametrize(
    ("visible", "device", "size", "devices", "expected"),
    [
        (None, "cuda:2", 1, (), "2"),
        (None, "cuda:2", 2, (), "2,3"),
        (None, "cuda:1", 2, (1, 3), "1,3"),
        ("4,5,6,7", "cuda:2", 1, (), "6"),
        ("GPU-a,GPU-b", "cuda:1", 1, (1,), "GPU-b"),
        (None, "cuda", 1, (), "0"),
        ("3", "cpu", 1, (), "3"),
    ],
)
def test_process_sees_the_devices_of_its_engine(monkeypatch, visible, device, size, devices, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = RolloutSettings(device, tensor_parallel_size=size, devices=devices)
    assert device_environment(settings)["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(("devices", "visible"), [((1,), ""), ((), "0,1")])
def test_too_few_devices_are_refused(monkeypatch, devices, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(EngineError, match="2 ranks need 2 devices"):
        device_environment(RolloutSettings("cuda:1", tensor_parallel_size=2, devices=devices))


# -- received weights for vLLM's processes: the pages that the sender has written -------------------------------------
class Source:
    def __init__(self):
        self.version = 0

    def named_weights(self):
        yield "a", torch.full((5, 7), float(self.version))
        yield "b", torch.full((3,), float(self.version), dtype=torch.bfloat16)


@pytest.fixture
def received():
    source, (sender, receiver) = Source(), (PullTransport(), PullTransport())

    def receive():
        source.version += 1
        return receiver.receive(publish(sender, source)[0])

    yield receive
    receiver.close()
    sender.close()


def share(weights, on_device=False):
    with share_weights(weights, on_device) as shared:
        return SharedSnapshot(**json.loads(json.dumps(asdict(shared)))).open(torch.device("cpu"))


def test_weights_on_a_device_are_shared_in_host_memory():
    source, (sender, receiver) = Source(), (CudaIpcTransport(), CudaIpcTransport())
    weights = receiver.receive(publish(sender, source)[0])
    for opened in (share(weights), pickle.loads(pickle.dumps(weights))):
        verify_snapshot(opened, weights.shapes, -1)
        assert opened.stamp == take_snapshot(source.named_weights(), 0).stamp
        assert torch.equal(opened.tensor("b"), weights.tensor("b"))
    sender.close()


@pytest.mark.feature(14)
def test_weights_on_a_device_are_opened_there(monkeypatch):
    """The host stands in for the device. Two bytes of a parameter in bf16 are all that there is of it."""
    source, (sender, receiver) = Source(), (CudaIpcTransport(), CudaIpcTransport())
    weights = receiver.receive(publish(sender, source)[0])
    monkeypatch.setattr(os, "memfd_create", None)
    opened = share(weights, on_device=True)
    verify_snapshot(opened, weights.shapes, -1)
    assert opened.stamp == weights.stamp
    assert opened.buffers["b"].data_ptr() == weights.buffers["b"].data_ptr()
    assert (opened.tensor("b").dtype, opened.buffers["b"].nbytes) == (torch.bfloat16, 2 * 3)
    weights.buffers["a"][3] += 1
    with pytest.raises(WeightSyncError, match="'a', 'b' came with other bytes than were sent"):
        share(weights, on_device=True)
    sender.close()


@pytest.mark.feature(14)
def test_received_weights_are_shared_without_a_copy(received, monkeypatch):
    weights = received()
    monkeypatch.setattr(os, "memfd_create", None)
    opened = share(weights)
    verify_snapshot(opened, weights.shapes, -1)
    assert opened.stamp == weights.stamp
    again = share(opened)  # from that process to its workers
    assert again.tensor("a").tolist() == weights.tensor("a").tolist()


@pytest.mark.parametrize("place", ["file", "host", "device"])
def test_adapters_are_shared_with_their_weights(received, place):
    factors = take_snapshot({"a" + DOWN: torch.ones(2, 7), "a" + UP: torch.ones(5, 2)}.items(), 1)
    weights, sender = received(), CudaIpcTransport()
    if place == "device":
        source = Source()
        source.version = weights.version
        weights = CudaIpcTransport().receive(publish(sender, source)[0])
    weights = replace(
        weights, version=3, adapters=Adapters(factors, 0.5), file=weights.file if place == "file" else None
    )
    opened = share(weights, on_device=place == "device")
    verify_snapshot(opened, weights.shapes, -1)
    assert opened.stamp == weights.stamp
    assert [opened.tensor(name).unique().tolist() for name in "ab"] == [[2.0], [1.0]]


def test_weights_open_in_a_process_are_not_overwritten(received):
    opened = share(received())
    gc.collect()
    for _ in range(3):
        received()
    assert [opened.tensor(name).unique().tolist() for name in "ab"] == [[1.0], [1.0]]


def test_weights_without_a_file_are_copied_for_the_block():
    weights = take_snapshot(Source().named_weights(), 0)
    with share_weights(weights) as shared:
        assert shared.open(torch.device("cpu")).tensor("b").tolist() == [0.0] * 3
    with pytest.raises(FileNotFoundError):
        shared.open(torch.device("cpu"))
