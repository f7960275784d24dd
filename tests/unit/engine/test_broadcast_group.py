# SPDX-License-Identifier: Apache-2.0
"""A broadcast by nccl, here by a stand-in: how it ends, and what is said of it."""

from types import SimpleNamespace

import pytest
import torch

from dlrover.python.rl.engine.weight_sync.collective import BroadcastGroup


def group(is_completed=lambda: True, exception=lambda: None, timeout_s=5.0):
    work = SimpleNamespace(is_completed=is_completed, exception=exception)
    backend = SimpleNamespace(name=lambda: "nccl", broadcast=lambda tensor, rank: work, abort=lambda: None)
    return BroadcastGroup("g", backend, timeout_s)


def cannot_be_given():
    raise TypeError("Unregistered type: std::exception_ptr")


def test_work_that_is_complete_has_arrived():
    group().broadcast(torch.zeros(1))
    group(exception=cannot_be_given).broadcast(torch.zeros(1))


def test_work_that_is_complete_because_it_has_failed_has_not():
    broken = group(exception=lambda: RuntimeError("NCCL error: remote process exited"))
    with pytest.raises(ConnectionError, match="nccl failed: NCCL error: remote process exited"):
        broken.broadcast(torch.zeros(1))


def test_work_that_does_not_end_is_given_up():
    late = group(is_completed=lambda: False, timeout_s=0.05)
    with pytest.raises(ConnectionError, match="has not ended within 0.05 s"):
        late.broadcast(torch.zeros(1))
    late.leave()
