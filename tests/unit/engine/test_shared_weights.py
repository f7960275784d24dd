# SPDX-License-Identifier: Apache-2.0
"""Received weights for vLLM's processes: the pages that the sender has written, which stay as they are while in use."""

import gc
import os
import pickle
from dataclasses import replace

import pytest
import torch

from dlrover.python.rl.engine.api.weights import DOWN, UP, Adapters, take_snapshot, verify_snapshot
from dlrover.python.rl.engine.vllm.child import share_weights
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.pull import PullTransport


class Source:
    def __init__(self):
        self.version = 0

    def named_weights(self):
        yield "a", torch.full((5, 7), float(self.version))
        yield "b", torch.full((3,), float(self.version), dtype=torch.bfloat16)


class Sync:
    def __init__(self):
        self.source, self.sender, self.receiver = Source(), PullTransport(), PullTransport()

    def next(self):
        self.source.version += 1
        ticket = self.sender.offer(self.source)
        self.sender.send(ticket, self.source)
        return self.receiver.receive(ticket)


@pytest.fixture
def sync():
    made = Sync()
    yield made
    made.receiver.close()
    made.sender.close()


def test_weights_on_a_device_are_passed_on_in_host_memory():
    source, (sender, receiver) = Source(), (CudaIpcTransport(), CudaIpcTransport())
    ticket = sender.offer(source)
    sender.send(ticket, source)
    received = receiver.receive(ticket)
    for opened in (share(received), pickle.loads(pickle.dumps(received))):
        verify_snapshot(opened, received.shapes, -1)
        assert opened.stamp == take_snapshot(source.named_weights(), 0).stamp
        assert torch.equal(opened.tensor("b"), received.tensor("b"))
    sender.close()


def share(weights):
    """What another process opens."""
    with share_weights(weights) as shared:
        return pickle.loads(pickle.dumps(shared)).open()


@pytest.mark.feature(14)
def test_received_weights_are_passed_on_without_a_copy(sync, monkeypatch):
    received = sync.next()
    monkeypatch.setattr(os, "memfd_create", None)
    opened = share(received)
    verify_snapshot(opened, received.shapes, -1)
    assert opened.stamp == received.stamp
    again = share(opened)  # from that process to its workers
    assert again.tensor("a").tolist() == received.tensor("a").tolist()


@pytest.mark.parametrize("in_a_file", [True, False])
def test_adapters_go_with_the_weights_that_they_are_added_to(sync, in_a_file):
    factors = take_snapshot({"a" + DOWN: torch.ones(2, 7), "a" + UP: torch.ones(5, 2)}.items(), 1)
    received = replace(sync.next(), adapters=Adapters(factors, 0.5))
    if not in_a_file:
        received = replace(received, file=None)
    with share_weights(received) as shared:
        opened = pickle.loads(pickle.dumps(shared)).open()
    verify_snapshot(opened, received.shapes, -1)
    assert opened.stamp == received.stamp
    assert [opened.tensor(name).unique().tolist() for name in "ab"] == [[2.0], [1.0]]


def test_weights_that_a_process_has_open_are_not_overwritten(sync):
    received = sync.next()
    opened = share(received)
    del received
    gc.collect()
    for _ in range(3):
        sync.next()
    assert opened.tensor("a").unique().tolist() == [1.0]
    assert opened.tensor("b").unique().tolist() == [1.0]


def test_weights_in_no_file_are_copied_to_one_that_ends_with_the_block(sync):
    weights = take_snapshot(sync.source.named_weights(), 0)
    with share_weights(weights) as shared:
        assert shared.open().tensor("b").tolist() == [0.0] * 3
    with pytest.raises(FileNotFoundError):
        shared.open()
