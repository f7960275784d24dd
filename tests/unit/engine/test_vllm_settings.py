# SPDX-License-Identifier: Apache-2.0
"""What the vLLM engine refuses before vLLM starts, and what of its options needs no vLLM to be seen."""

import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, read_options, validate_engine
from dlrover.python.rl.engine.vllm import VllmOptions

FIXED = {
    "model": "another",
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "ray",
    "enable_sleep_mode": False,
    "worker_extension_cls": "a.b",
    "moe_backend": "auto",
    "async_scheduling": True,
    "speculative_config": {"method": "ngram"},
    "logprobs_mode": "raw_logprobs",
    "logits_processors": ["a:B"],
}


@pytest.mark.parametrize("name", FIXED)
def test_an_argument_that_the_engine_depends_on_is_refused_by_name(name):
    options = {"engine_args": {name: FIXED[name], "max_num_batched_tokens": 64}}
    with pytest.raises(EngineError, match=rf"^backend: arguments of vLLM .* cannot be given: {name}, got"):
        read_options(VllmOptions, options)
    (error,) = validate_engine(ROLLOUT_ENGINES, "vllm", options, "config.engine.rollout", runs_here=False)
    assert (error.where, f"cannot be given: {name}" in error.what) == ("config.engine.rollout_options", True)


def test_other_arguments_are_passed_on():
    options = {"engine_args": {"max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1}}
    assert read_options(VllmOptions, options).engine_args == options["engine_args"]
