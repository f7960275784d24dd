# SPDX-License-Identifier: Apache-2.0
"""Log-probs without all of the logits: the output layer computes logits for a chunk of tokens at a time, and again in
the backward pass.

With a vocabulary of 152,000 the logits of 16,384 tokens in bf16 and their gradient take 10 GB, more than the rest of a
small model. Chunks take :data:`CHUNK_ELEMENTS` logits and their gradient, and one more matrix product.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

CHUNK_ELEMENTS = 1 << 29
"""Maximum logits at a time; if a micro-batch has fewer, all are computed at once and kept for the backward pass."""

RAW_LOGITS = frozenset(
    {"llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
)
"""Types of models whose logits are known to be the outputs of their last layer: others scale or cap them."""

Score: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""Maps logits ``[tokens, vocab]`` and targets to log-probs ``[tokens, n]`` and entropies ``[tokens]``, or None."""


class ChunkedLogprobs(torch.autograd.Function):
    """Applies ``score`` to the logits of ``hidden`` (``[tokens, width]``), ``rows`` tokens at a time: log-probs ``[1,
    tokens, n]``, and entropies. The gradient of ``weight`` is summed in float32 (float64 for float64)."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no keywords
        ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, score: Score, rows: int
    ) -> tuple[Any, Any]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.score, ctx.rows = score, rows
        ctx.set_materialize_grads(False)
        parts = [score(functional.linear(hidden[part], weight, bias), targets[part]) for part in _parts(hidden, rows)]
        logprobs, entropies = zip(*parts, strict=True)
        # Stacked, which copies: FSDP2 refuses a view as the output of a module.
        return torch.stack([torch.cat(logprobs)]), None if entropies[0] is None else torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, by_logprob: Any, by_entropy: Any) -> tuple[Any, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        slopes = (None if by_logprob is None else by_logprob[0], by_entropy)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        by_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _parts(hidden, ctx.rows):
            logits = functional.linear(hidden[part], weight, bias).requires_grad_()
            with torch.enable_grad():
                scored = zip(ctx.score(logits, targets[part]), slopes, strict=True)
                outputs, by = zip(*((out, slope[part]) for out, slope in scored if slope is not None), strict=True)
            (gradient,) = torch.autograd.grad(outputs, logits, by)
            if by_hidden is not None:
                by_hidden[part] = gradient @ weight
            if by_weight is not None:
                by_weight += gradient.t() @ hidden[part]
            if by_bias is not None:
                by_bias += gradient.sum(dim=0, dtype=wide)
        by_weight = by_weight if by_weight is None else by_weight.to(weight.dtype)
        return by_hidden, by_weight, by_bias if by_bias is None else by_bias.to(bias.dtype), None, None, None


def _parts(hidden: Any, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


class ChunkedHead:
    """The output layer of a language model, made to return log-probs in place of many logits: within the model's own
    forward pass, where its weight is whole."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._request: tuple[Any, Score, int] | None = None
        self.entropies: Any = None
        layer.forward = self._forward

    @classmethod
    def of(cls, model: Any) -> "ChunkedHead | None":
        """Wrap the output layer of a model; None if the model changes the layer's outputs."""
        layer = getattr(model, "lm_head", None)
        if model.config.model_type not in RAW_LOGITS or type(layer) is not torch.nn.Linear:
            return None
        return cls(layer)

    def rows_at_a_time(self, tokens: int) -> int | None:
        """Return the tokens of a chunk; None if one chunk holds all."""
        rows = max(1, CHUNK_ELEMENTS // int(self._layer.out_features))
        return rows if tokens > rows else None

    @contextmanager
    def scoring(self, targets: Any, score: Score, rows: int) -> Iterator[None]:
        """Let the model return the log-probs of ``len(targets)`` tokens, ``[1, tokens, n]``, as its logits. Entropies
        are in ``entropies``, since an entropy that is only measured has no gradient."""
        self._request = targets, score, rows
        try:
            yield
        finally:
            self._request = self.entropies = None

    def _forward(self, hidden: Any) -> Any:
        weight, bias = self._layer.weight, self._layer.bias
        if self._request is None:
            return functional.linear(hidden, weight, bias)
        logprobs, self.entropies = ChunkedLogprobs.apply(hidden[0], weight, bias, *self._request)
        return logprobs


LOWEST = -1e4
"""The lowest centred logit where it is a factor: minus infinity has weight 0, and 0 times infinity is NaN."""


def sums(logits: Any, most: Any, temperature: float) -> tuple[Any, Any]:
    """Sum ``exp(c)`` and ``exp(c) c`` over the vocabulary, float32 ``[tokens]``, with ``c = (logits - most) / T``."""
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
    """Compute the gradient of log-probs at one place of each row, and of entropies unless ``by_entropy`` is None; see
    ``outputs._TokenLogprobs``. ``by_target`` is 0 where another rank has the place."""
    at_target = torch.arange(logits.shape[1], device=logits.device)[None] == places
    logprobs = (logits.float() - most[:, None]) / temperature - log_total[:, None]
    slope = by_logprob
    if by_entropy is not None:
        slope = slope + (logprobs.clamp(min=LOWEST) + entropies[:, None]) * by_entropy[:, None]
    return ((torch.where(at_target, by_target, 0.0) - logprobs.exp() * slope) / temperature).to(logits.dtype)


def applies_to(logits: Any) -> bool:
    """Return True if the functions above can be compiled for the device and dtype of ``logits``."""
    return bool(logits.is_cuda) and logits.dtype != torch.float64 and _can_compile(logits.device)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for any number of tokens."""
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
