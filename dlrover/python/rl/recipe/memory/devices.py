# SPDX-License-Identifier: Apache-2.0
"""A recipe's configuration with every key: defaults, and ``auto`` resolved for the job's devices."""

import dataclasses
from collections.abc import Mapping
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
