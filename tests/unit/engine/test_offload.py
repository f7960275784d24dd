# SPDX-License-Identifier: Apache-2.0
"""An engine's tensors on the way between its device, which the host stands in for, and host memory."""

import pytest
import torch

from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.memory.offload import ParkedTensors


@pytest.mark.parametrize("step", ["zeros", "copy_"])
def test_a_way_to_the_host_that_breaks_off_can_be_gone_back_and_again(monkeypatch, step):
    parked = ParkedTensors("actor", DeviceMemory())
    tensors = [torch.full((10,), float(number)) for number in range(3)]
    wanted = [tensor.clone() for tensor in tensors]
    parked.hold("weights", tensors)
    owner = torch if step == "zeros" else torch.Tensor
    real, calls = getattr(owner, step), []

    def scarce(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no page-locked memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, step, scarce)
    with pytest.raises(RuntimeError, match="page-locked"):
        parked.to_host()
    monkeypatch.undo()
    assert not parked.on_device
    assert [parked.locate(tensor).tolist() for tensor in tensors] == [each.tolist() for each in wanted]
    parked.to_device()
    assert [tensor.tolist() for tensor in tensors] == [each.tolist() for each in wanted]
    parked.to_host()
    assert parked.memory.total() == 0
    parked.to_device()
    assert [tensor.tolist() for tensor in tensors] == [each.tolist() for each in wanted]
