# SPDX-License-Identifier: Apache-2.0
"""A shim that lets megatron-core compute on a node without CUDA: for tests, and slow.

Inside a ``with`` block the CPU replaces CUDA devices, and the functions of ``torch.cuda`` that megatron-core calls do
nothing or answer for the CPU. Both share one random state, so dropout has to be 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)
_HOST = torch.device("cpu")


class CpuShim(TorchFunctionMode):
    """A reentrant ``with`` block in which CUDA is the CPU. Raises an ``EngineError`` on a node with CUDA."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            raise EngineError("cpu_shim is for nodes without CUDA: remove the option")
        _LOG.warning("cpu_shim is on: megatron-core computes on the CPU, for tests only")
        super().__init__()
        self._depth = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "CpuShim":
        self._depth += 1
        if self._depth == 1:
            self._originals = [(module, name, getattr(module, name)) for module, name, _ in _ANSWERS]
            for module, name, answer in _ANSWERS:
                setattr(module, name, answer)
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            super().__exit__(*error)
            for module, name, original in self._originals:
                setattr(module, name, original)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _HOST
        if func is torch.Tensor.to:
            args = tuple(_HOST if _names_cuda(argument) else argument for argument in args)
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


_ANSWERS: list[tuple[Any, str, Callable[..., Any]]] = [
    (torch.cuda, "current_device", lambda: _HOST),
    (torch.cuda, "manual_seed", torch.manual_seed),
    (torch.cuda, "synchronize", lambda *args, **options: None),
    (torch.cuda, "empty_cache", lambda *args, **options: None),
    (torch.cuda, "get_rng_state", lambda *devices, **options: torch.get_rng_state()),
    (torch.cuda, "set_rng_state", lambda state, *devices, **options: torch.set_rng_state(state)),
    (megatron_random, "_get_cuda_rng_state", lambda *devices, **options: torch.get_rng_state()),
    (megatron_random, "_set_cuda_rng_state", lambda state, *devices, **options: torch.set_rng_state(state)),
]
