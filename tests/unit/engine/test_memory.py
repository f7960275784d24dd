# SPDX-License-Identifier: Apache-2.0
"""Accounting for a device's memory, the host standing in for it."""

import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory


def test_a_tensor_counts_until_nothing_refers_to_it():
    memory = DeviceMemory()
    there = memory.bring("actor", "weights", torch.zeros(10))
    view = there[2:]
    assert memory.bytes_of("actor") == {"weights": 40}
    del there
    assert memory.total() == 40
    del view
    assert (memory.total(), memory.bytes_of("actor"), memory.peak) == (0, {}, 40)


def test_a_storage_counts_once():
    memory = DeviceMemory()
    whole = torch.zeros(10)
    memory.hold("actor", "weights", [whole, whole[:5], whole])
    memory.hold("rollout", "weights", [whole])
    assert memory.by_owner() == {"actor": {"weights": 40}}


def test_what_does_not_fit_is_refused_with_who_holds_what():
    memory = DeviceMemory(capacity=100)
    kept = [memory.bring("actor", "weights", torch.zeros(10)), memory.bring("actor", "optimizer", torch.zeros(10))]
    with pytest.raises(OutOfDeviceMemory) as caught:
        memory.bring("rollout", "kv_cache", torch.zeros(10))
    assert str(caught.value) == (
        "rollout asks for 40 bytes of kv_cache on cpu: 80 of 100 bytes are in use (actor: 40 of weights"
        " + 40 of optimizer)"
    )
    kept.pop()
    assert memory.bring("rollout", "kv_cache", torch.zeros(10)).shape == (10,)


@pytest.mark.parametrize("words", ["CUDA Error: out of memory at cumem_allocator.cpp:62", "CUDA out of memory."])
def test_what_another_program_says_in_words_is_told_with_who_holds_what(words):
    memory = DeviceMemory()
    kept = memory.bring("actor", "weights", torch.zeros(10))
    told = pytest.raises(
        OutOfDeviceMemory, match=r"vllm ran out of memory .* 40 bytes are in use \(actor: 40 of weights\)"
    )
    with told, memory.computing("vllm"):
        raise EngineError("it broke off") from RuntimeError(words)
    with pytest.raises(EngineError, match="^it broke off$"), memory.computing("vllm"):
        raise EngineError("it broke off")
    assert kept is not None


def test_what_is_released_no_longer_counts_though_somebody_still_refers_to_it():
    memory = DeviceMemory(capacity=100)
    bucket = torch.zeros(80, dtype=torch.uint8)
    memory.hold("sync", "buffer", [bucket])
    memory.release(bucket[:8])
    assert (memory.total(), memory.peak) == (0, 80)
    memory.require("actor", "weights", 100)
