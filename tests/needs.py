# SPDX-License-Identifier: Apache-2.0
"""Backends and devices that a test may need beyond what ``make test`` installs.

A test marked ``needs("vllm")`` is not collected where vLLM is absent. ``docs/contributing/tests.md`` lists every need.
"""

import os
from functools import cache
from importlib.util import find_spec


def cuda_devices():
    import torch  # needed only where a collected test asks for CUDA

    return torch.cuda.device_count()


NEEDS = {
    "cuda": lambda: cuda_devices() >= 1,
    "two cuda devices": lambda: cuda_devices() >= 2,
    "no cuda": lambda: cuda_devices() == 0,
    "deepspeed": lambda: find_spec("deepspeed"),
    "megatron": lambda: find_spec("megatron") and find_spec("megatron.core"),
    "mcp": lambda: find_spec("mcp"),
    "openai": lambda: find_spec("openai"),
    "openenv": lambda: find_spec("openenv"),
    "playwright": lambda: find_spec("playwright"),
    "reasoning_gym": lambda: find_spec("reasoning_gym"),
    "verifiers": lambda: find_spec("verifiers"),
    "vllm": lambda: find_spec("vllm"),
    "interpreted triton": lambda: os.environ.get("TRITON_INTERPRET") == "1",
}


@cache
def is_here(need):
    return bool(NEEDS[need]())


def absent_need(item):
    """Return the first need of a test that is absent here, or an empty text."""
    needs = (need for mark in item.iter_markers("needs") for need in mark.args)
    return next((need for need in needs if not is_here(need)), "")
