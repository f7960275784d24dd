"""Causal attention on a host, a band of queries at a time: matrix products that a processor's caches can hold.

For documents of a few hundred tokens this is faster there than the library's kernel, forward and backward, because the
probabilities are kept. They take ``length^2 / 2`` numbers a head, so longer documents are left to the library.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

LENGTHS = range(192, 1025)
"""Tokens of the documents that are faster this way and whose probabilities may be kept."""

BAND = 160
"""Most queries of a band."""


def suits_bands(query: Any) -> bool:
    """Whether documents ``[..., tokens, dim]`` attend by :func:`band_attention` best."""
    return query.device.type == "cpu" and query.dtype == torch.float32 and query.shape[-2] in LENGTHS


def band_attention(query: Any, key: Any, value: Any, scaling: float | None = None) -> Any:
    """Causal attention within documents of equal length.

    Args:
        query: ``[documents, heads, tokens, dim]``.
        key: ``[documents, key-value heads, tokens, dim]``.
        value: as ``key``.
        scaling: of the scores; the square root of ``1 / dim`` by default.

    Returns:
        As ``query``.
    """
    documents, heads = query.shape[:2]
    if key.shape[1] != heads:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    flat = (tensor.flatten(0, 1) for tensor in (query, key, value))
    return _BandAttention.apply(*flat, factor).unflatten(0, (documents, heads))


class _BandAttention(torch.autograd.Function):
    """With ``P = softmax(c Q K^T)``, where no query sees a later key, and ``O = P V``: ``dV = P^T dO``,
    ``dS = P (dO V^T - rowsum(P dO V^T))``, ``dQ = c dS K`` and ``dK = c dS^T Q``. All are ``[batch, tokens, dim]``."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, factor: float) -> Any:
        found = torch.empty_like(query)
        nothing = query.new_empty(1)
        later = query.new_full((BAND, BAND), -torch.inf).triu_(1)
        kept = []
        for begin, end in _bands(query.shape[1]):
            seen = key[:, :end].transpose(1, 2)
            weights = torch.baddbmm(nothing, query[:, begin:end], seen, beta=0, alpha=factor)
            weights[:, :, begin:] += later[: end - begin, : end - begin]
            torch.softmax(weights, -1, out=weights)
            found[:, begin:end] = torch.bmm(weights, value[:, :end])
            kept.append(weights)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.factor = factor
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, Any, None]:
        query, key, value, *kept = ctx.saved_tensors
        by_query, by_key, by_value = (tensor.new_zeros(tensor.shape) for tensor in (query, key, value))
        for (begin, end), weights in zip(_bands(query.shape[1]), kept, strict=True):
            outer = gradient[:, begin:end]
            slope = torch.bmm(outer, value[:, :end].transpose(1, 2))
            slope = torch._softmax_backward_data(slope, weights, -1, weights.dtype)
            # Not baddbmm_: into a part of a tensor, that is a product for each of the batch.
            by_value[:, :end] += torch.bmm(weights.transpose(1, 2), outer)
            by_query[:, begin:end] = torch.bmm(slope, key[:, :end])
            by_key[:, :end] += torch.bmm(slope.transpose(1, 2), query[:, begin:end])
        return by_query.mul_(ctx.factor), by_key.mul_(ctx.factor), by_value, None


def _bands(length: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each band, of nearly equal sizes."""
    size = -(-length // -(-length // BAND))
    return ((begin, min(begin + size, length)) for begin in range(0, length, size))
