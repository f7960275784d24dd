# SPDX-License-Identifier: Apache-2.0
"""A rollout engine over SGLang's HTTP server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Gt

from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.model_shape import by_library, find_class_fault


@dataclass(frozen=True)
class SglangOptions:
    url: str | None = None
    """A running server that was started with the flags of :func:`launch_arguments`; None starts one."""

    chunk_tokens: Annotated[int, Gt(0)] = 64
    """Most tokens that one ``advance`` generates for each request."""

    start_timeout_s: Annotated[float, Gt(0.0)] = 600.0
    """Limit on the start of a server."""

    timeout_s: Annotated[float, Gt(0.0)] = 3600.0
    """Limit on a call; it may generate whole completions."""

    exchange: str | None = None
    """Folder in which weights are passed to the server, visible to both; None: the system's temporary folder."""

    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Further flags of a started server: ``{"attention-backend": "triton"}``; True is a flag without a value."""


def launch_arguments(folder: str, settings: RolloutSettings, options: SglangOptions) -> list[str]:
    """Build the server's flags, with effective seeds, matching log-probs, and memory that can be released."""
    flags: dict[str, Any] = {
        "model-path": folder,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[settings.precision],
        "device": settings.device.partition(":")[0],
        "tp-size": settings.tensor_parallel_size,
        "max-running-requests": settings.max_batch,
        "mem-fraction-static": settings.gpu_memory_utilization,
        "sampling-backend": "pytorch",  # flashinfer has no seeds
        "enable-deterministic-inference": True,
        "enable-memory-saver": True,
        **options.server_args,
    }
    arguments = []
    for name, value in flags.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not False and value is not None:
            arguments += [f"--{name}", str(value)]
    return arguments


INFO = EngineInfo(
    SglangOptions, "sglang", may_be_remote=True, fills_device=True, adds_adapters=True,
    find_model_fault=by_library(find_class_fault),
)  # fmt: skip
