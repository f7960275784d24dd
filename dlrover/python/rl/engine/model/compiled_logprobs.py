# SPDX-License-Identifier: Apache-2.0
"""What log-probs need of logits on a GPU, in kernels that ``torch.compile`` makes: each reads the logits once, and
keeps nothing of their size but the gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

LOWEST = -1e4
"""Of a centred logit where it is a factor: one of minus infinity has weight 0, and 0 times infinity is NaN."""


def sums(logits: Any, most: Any, temperature: float) -> tuple[Any, Any]:
    """Of ``exp(c)`` and of ``exp(c) c`` over the vocabulary, float32 ``[tokens]``, with ``c = (logits - most) / T``."""
    centred = (logits.float() - most[:, None]) / temperature
    weights = centred.exp()
    return weights.sum(dim=1), (weights * centred.clamp(min=LOWEST)).sum(dim=1)


def gradient(  # noqa: PLR0913 - the factors of the formula
    logits: Any,
    most: Any,
    log_total: Any,
    places: Any,
    by_target: Any,
    by_logprob: Any,
    temperature: float,
    entropies: Any,
    by_entropy: Any,
) -> Any:
    """The gradient of log-probs at one place of each row, and of entropies unless ``by_entropy`` is None; see
    ``outputs._TokenLogprobs``. ``by_target`` is 0 where another rank has the place."""
    at_target = torch.arange(logits.shape[1], device=logits.device)[None] == places
    logprobs = (logits.float() - most[:, None]) / temperature - log_total[:, None]
    slope = by_logprob
    if by_entropy is not None:
        slope = slope + (logprobs.clamp(min=LOWEST) + entropies[:, None]) * by_entropy[:, None]
    return ((torch.where(at_target, by_target, 0.0) - logprobs.exp() * slope) / temperature).to(logits.dtype)


def applies_to(logits: Any) -> bool:
    """Whether these can be compiled for the device and dtype of ``logits``."""
    return bool(logits.is_cuda) and logits.dtype != torch.float64 and _can_compile(logits.device)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For any number of tokens."""
    return torch.compile(function, dynamic=True)


@functools.cache
def _can_compile(device: Any) -> bool:
    logits, most = torch.zeros((2, 8), device=device), torch.zeros(2, device=device)
    try:
        compiled(sums)(logits, most, 1.0)
    except Exception as error:  # noqa: BLE001 - a compiler that is absent or broken fails in many ways
        _LOG.warning("log-probs are slower here, because torch.compile fails: %s", str(error).partition("\n")[0])
        return False
    return True
