# SPDX-License-Identifier: Apache-2.0
"""A job's devices: the configuration with ``auto`` resolved for them, and their speed and memory."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.config.plain import to_plain
from dlrover.python.rl.config.typed import rename_keys, require
from dlrover.python.rl.recipe.base.config import AUTO

Devices: TypeAlias = Literal["CPU", "GPU", "HERE"]
"""``trainer.device_type`` of a job that is to be placed; ``HERE``: those of this process."""

ON_CUDA: Mapping[str, Any] = {
    "prompts_per_step": 64,
    "rollout": {"max_new_tokens": 1024},
    "engine": {"gradient_checkpointing": AUTO, "max_tokens_per_microbatch": AUTO, "max_batch": 256},
}
"""Defaults on CUDA that differ from those of the configuration classes."""

T = TypeVar("T")

_WHERE = "config.engine.device"


def complete_config(schema: type[T], config: Any, devices: Devices) -> T:
    """Read ``config``. Raises InvalidJob with all errors, one of them for an engine on other devices than the job's."""
    given, _ = rename_keys(schema, to_plain(config) or {}, "config")
    engine = (given.get("engine") or {}) if isinstance(given, Mapping) else {}
    device = str(engine.get("device", AUTO)) if isinstance(engine, Mapping) else AUTO
    on_cuda = _is_cuda(device, devices)
    cfg: Any = require(schema, _merge(_defaults_of(schema, ON_CUDA), given) if on_cuda else given, "config")
    resolved: T = dataclasses.replace(cfg, engine=cfg.engine.resolve(on_cuda))
    return resolved


def _is_cuda(device: str, devices: Devices) -> bool:
    asked = device.partition(":")[0]
    if devices == "HERE":
        available = torch.cuda.is_available()
        if asked == "cuda" and not available:
            what = f"'{device}', but PyTorch finds no CUDA device here; write engine.device=auto"
            raise InvalidJob([ConfigError(_WHERE, what)])
        return available if asked == AUTO else asked == "cuda"
    has_gpus = devices == "GPU"
    if asked in ("cpu", "cuda") and has_gpus != (asked == "cuda"):
        what = "its GPUs would be idle" if has_gpus else "no GPU is reserved"
        advice = f"write trainer.device_type={'CPU' if has_gpus else 'GPU'} or engine.device=auto"
        raise InvalidJob([ConfigError(_WHERE, f"'{device}', but the job is one on {devices}s: {what}; {advice}")])
    return has_gpus


def _defaults_of(schema: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``defaults`` that ``schema`` has."""
    fields = {field.name: field for field in dataclasses.fields(schema)}
    return {name: value for name, value in defaults.items() if name in fields}


def _merge(defaults: Mapping[str, Any], given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    merged = dict(given)
    for name, value in defaults.items():
        if name not in given:
            merged[name] = value
        elif isinstance(value, Mapping):
            merged[name] = _merge(value, given[name])
    return merged


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
