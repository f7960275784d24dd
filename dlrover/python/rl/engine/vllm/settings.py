"""What the vLLM engine can be told, and what that is in vLLM's own words. To check a job by it vLLM is not imported."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Gt

from dlrover.python.rl.engine.base import RolloutSettings
from dlrover.python.rl.engine.torch.loading import CausalLM
from dlrover.python.rl.engine.torch.outline import cache_bytes_per_token
from dlrover.python.rl.engine.torch.precision import DTYPES

_HERE = "dlrover.python.rl.engine.vllm"
_BLOCK = 128
"""Tokens of the largest cache block; a sequence may leave that many of its last one unused."""


@dataclass(frozen=True)
class VllmOptions:
    """``backend`` options of the rollout engine ``vllm``."""

    max_model_len: Annotated[int, Gt(0)] | None = None
    """Longest sequence in tokens; None: what the model allows."""

    kv_cache_bytes: Annotated[int, Gt(0)] | None = None
    """Size of the key-value cache. None: on a GPU what ``gpu_memory_utilization`` leaves, on a CPU what ``max_batch``
    sequences of full length take."""

    compile: bool = True
    """On a GPU, compile the model and record CUDA graphs; the start takes longer. A CPU runs eagerly in any case."""

    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs``; they win."""


def engine_arguments(model: str, lm: CausalLM, settings: RolloutSettings, options: VllmOptions) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``.

    Args:
        model: the folder.
        lm: its outline.
        settings: of the engine.
        options: vLLM's own.
    """
    on_cpu = settings.device == "cpu"
    longest = options.max_model_len or lm.max_positions
    cache = options.kv_cache_bytes
    if cache is None and on_cpu and longest is not None:
        cache = settings.max_batch * (longest + _BLOCK) * cache_bytes_per_token(lm, DTYPES[settings.precision])
    return {
        "model": model,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[settings.precision],
        "max_model_len": longest,
        "max_num_seqs": settings.max_batch,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",  # never Ray's actors
        "async_scheduling": False,  # drawing has to know how many tokens there are
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache,
        "enforce_eager": on_cpu or not options.compile,
        "enable_sleep_mode": not on_cpu,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # not the model's own: the port says how to sample
        "logprobs_mode": "processed_logits",
        "logits_processors": [f"{_HERE}.drawing:PositionDrawing"],
        "worker_extension_cls": f"{_HERE}.worker.WeightTaker",
        "disable_log_stats": True,
        **options.engine_args,
    }
