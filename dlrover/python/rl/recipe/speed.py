"""How fast a model is trained, and what share of the hardware's peak that is."""

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
    """What trains.

    Attributes:
        parameters: of the whole model.
        peak_flops: operations per second of one member's device, None where it is not known.
    """

    parameters: int
    peak_flops: float | None = None

    @classmethod
    def of(cls, engine: Any, device: str, precision: str) -> "Machine":
        """That of an engine; one of a user's own need not know its size."""
        return cls(int(getattr(engine, "parameter_count", 0)), _peak(device, precision))

    def figures(self, tokens: int, members: int, times: Mapping[str, float]) -> dict[str, float]:
        """``tokens_per_s`` over the whole step. Over its update alone: ``train_tflops`` (10^12 operations per second,
        those of attention and of recomputing not counted), and its share of the peak, ``mfu``, where that is known."""
        told = {"tokens_per_s": tokens / times["step_s"]}
        update_s = times.get("time/update", 0.0)
        if not self.parameters or not update_s:
            return told
        flops = _PER_PARAMETER * self.parameters * tokens / update_s
        share = {"mfu": flops / (self.peak_flops * members)} if self.peak_flops else {}
        return {**told, "train_tflops": flops / 1e12, **share}


def _peak(device: str, precision: str) -> float | None:
    if torch.device(device).type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(torch.device(device)).upper()
    return next((peak for known, peak in _PEAKS.items() if known in name), None)
