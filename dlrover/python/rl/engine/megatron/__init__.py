# SPDX-License-Identifier: Apache-2.0
"""A train engine on megatron-core: tensor and pipeline parallel, for models built like Llama."""

from dataclasses import dataclass
from typing import Any

from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.model_shape import by_library


@dataclass(frozen=True)
class MegatronOptions:
    cpu_shim: bool = False
    """Run on a node without CUDA, for tests: megatron-core's CUDA calls go to the CPU."""


def _find_fault(config: Any, head: str) -> str:
    from dlrover.python.rl.engine.megatron.conversion import find_faults  # on demand, for it imports torch

    return "; ".join(f"megatron cannot run this model: {fault}" for fault in find_faults(config))


INFO = EngineInfo(
    MegatronOptions,
    "megatron",
    "megatron-core",
    deterministic_on=("cpu",),
    divides=("tensor_parallel_size", "pipeline_parallel_size"),
    adapters=False,
    shares_process=False,
    top_token_ids=False,
    sgd=False,
    adamw_8bit=True,
    bare_head=False,
    redivides=False,
    masks_unknown_ids=True,
    find_model_fault=by_library(_find_fault),
)
