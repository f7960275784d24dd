# SPDX-License-Identifier: Apache-2.0
"""The devices that a process of an engine's own may see."""

import os

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import RolloutSettings


def device_environment(settings: RolloutSettings) -> dict[str, str]:
    """This process's environment, in which the devices of ``settings`` are the only visible ones: the backend numbers
    them from 0, in their order. Raises an ``EngineError`` if there are too few."""
    env, device = dict(os.environ), torch.device(settings.device)
    if device.type != "cuda":
        return env
    count, first = settings.tensor_parallel_size, device.index or 0
    numbers = settings.devices or tuple(range(first, first + count))
    visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if len(numbers) < count or (visible and max(numbers[:count]) >= len(visible)):
        raise EngineError(
            f"tensor_parallel_size {count} needs as many devices: {len(numbers)} are given, from {settings.device} on"
            f"{f', of {len(visible)} visible ones' if visible else ''}"
        )
    return {**env, "CUDA_VISIBLE_DEVICES": ",".join(visible[n] if visible else str(n) for n in numbers[:count])}
