"""What the SGLang engine can be told, and how it tells the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Gt

from dlrover.python.rl.engine.base import RolloutSettings


@dataclass(frozen=True)
class SglangOptions:
    """``backend`` options of the rollout engine ``sglang``."""

    url: str | None = None
    """A server that runs already, started with :func:`launch_arguments`' flags; None starts one."""

    chunk_tokens: Annotated[int, Gt(0)] = 64
    """Most tokens that one ``advance`` draws of each request."""

    start_timeout_s: Annotated[float, Gt(0.0)] = 600.0
    """How long a server may take to come up."""

    timeout_s: Annotated[float, Gt(0.0)] = 3600.0
    """How long a call may take, whole completions among them."""

    exchange: str | None = None
    """Where folders are made through which weights reach the server, which must see them too; None: among this
    machine's temporary files."""

    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Further flags of a server that is started: ``{"attention-backend": "triton"}``; True stands for a bare flag."""


def launch_arguments(folder: str, settings: RolloutSettings, options: SglangOptions) -> list[str]:
    """Flags of a server that keeps to the port: seeds that count, log-probs that match, memory that can be released."""
    flags: dict[str, Any] = {
        "model-path": folder,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[settings.precision],
        "device": settings.device.partition(":")[0],
        "tp-size": settings.tensor_parallel_size,
        "max-running-requests": settings.max_batch,
        "mem-fraction-static": settings.gpu_memory_utilization,
        "sampling-backend": "pytorch",  # the other one knows no seeds
        "enable-deterministic-inference": True,
        "enable-memory-saver": True,
        **options.server_args,
    }
    return [part for name, value in flags.items() for part in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    return [] if value is False or value is None else [f"--{name}", str(value)]
