# SPDX-License-Identifier: Apache-2.0
"""What a member's device does: its speed against the peak, and its memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12}
"""Dense floating-point operations per second of tensor cores in 16 bits, from the makers' data sheets."""

_PER_PARAMETER = 6
"""Floating-point operations of a token and parameter, forward and backward (Kaplan et al., arXiv:2001.08361, 2.1)."""


@dataclass(frozen=True)
class Machine:
    """The parameters of the whole model, and the peak FLOP/s of one member's device, None if unknown."""

    parameters: int
    peak_flops: float | None = None

    @classmethod
    def of(cls, engine: Any, device: str, precision: str) -> "Machine":
        """Of an engine; a user's engine may have no ``parameter_count``."""
        return cls(int(getattr(engine, "parameter_count", 0)), _peak(device, precision))

    def metrics(self, tokens: int, trained: int, members: int, times: Mapping[str, float]) -> dict[str, float]:
        """``speed/tokens_per_s`` over the whole step. Over its update alone, of the tokens ``trained`` on, once for
        each epoch: ``speed/train_tflops`` (10^12 operations per second, without attention and recomputation), and its
        share of the peak, ``speed/mfu``, if known."""
        metrics = {"speed/tokens_per_s": tokens / times["time/step"]}
        update_s = times.get("time/update", 0.0)
        if not self.parameters or not update_s:
            return metrics
        flops = _PER_PARAMETER * self.parameters * trained / update_s
        share = {"speed/mfu": flops / (self.peak_flops * members)} if self.peak_flops else {}
        return {**metrics, "speed/train_tflops": flops / 1e12, **share}


def _peak(device: str, precision: str) -> float | None:
    if torch.device(device).type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(torch.device(device)).upper()
    return next((peak for device_name, peak in _PEAKS.items() if device_name in name), None)


def peak_memory(device: str) -> dict[str, float]:
    """``memory/peak_gib``: the most that this process has had allocated on ``device``; empty for a CPU."""
    if torch.device(device).type != "cuda":
        return {}
    return {"memory/peak_gib": torch.cuda.max_memory_allocated(torch.device(device)) / 2**30}
