# SPDX-License-Identifier: Apache-2.0
"""The arguments of vLLM that an engine's settings stand for."""

from typing import Any

from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.model.loading import DTYPES, CausalLM
from dlrover.python.rl.engine.model.spec import count_cache_bytes_per_token
from dlrover.python.rl.engine.vllm import VllmOptions

_PACKAGE = "dlrover.python.rl.engine.vllm"
_BLOCK = 128
"""Tokens of the largest cache block, which a sequence may leave unused."""


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
        **({} if on_cpu else {"moe_backend": "triton"}),  # others convert the experts, which cannot be read back then
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # not the model's own: requests have sampling parameters
        "logprobs_mode": "processed_logits",
        "logits_processors": [f"{_PACKAGE}.worker:PositionSampler"],
        "worker_extension_cls": f"{_PACKAGE}.worker.WeightLoader",
        "disable_log_stats": True,
        **options.engine_args,
    }
