# SPDX-License-Identifier: Apache-2.0
"""The devices that the process of a rollout engine may see."""

import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.model.ranks import device_environment


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
def test_they_are_those_of_the_engine(monkeypatch, visible, device, size, devices, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = RolloutSettings(device, tensor_parallel_size=size, devices=devices)
    assert device_environment(settings)["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(("devices", "visible"), [((1,), ""), ((), "0,1")])
def test_too_few_are_refused(monkeypatch, devices, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(EngineError, match="tensor_parallel_size 2 needs 2 devices"):
        device_environment(RolloutSettings("cuda:1", tensor_parallel_size=2, devices=devices))
