# SPDX-License-Identifier: Apache-2.0
"""Attention over packed documents, for any Hugging Face model whose attention is configurable.

Each document attends to itself alone. On CUDA in half precision this is one FlashAttention call for all documents; else
one SDPA call for each run of documents of equal length.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from dlrover.python.rl.common.errors import EngineError

NAME = "dlrover_packed"
"""The value of a model's ``attn_implementation``."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that :func:`packed_attention` can compute."""

_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # absent in older versions of torch
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "is_causal"})


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents in a packed row; passed to the model as its argument ``documents``."""

    lengths: tuple[int, ...]  # tokens of each document
    device: str = "cpu"
    group: Any = None  # ranks that hold equal parts of the row (context parallel); None: the row is whole

    @cached_property
    def bounds(self) -> Any:
        """int32 ``[documents + 1]``: cumulative lengths, from 0."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)


def can_pack(model: Any) -> bool:
    """Return True if ``attn_implementation`` selects the attention of every layer, all of supported kinds, and rotary
    embeddings do not depend on the length of the row."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not getattr(model, "_supports_attention_backend", False) or getattr(model, "_is_stateful", False):
        return False
    # SDPA cannot compute capped scores or attention sinks: the model's own attention does.
    if not getattr(model, "_supports_sdpa", False) or find_fixed_positions(model) is not None:
        return False
    return kinds <= LAYER_TYPES and getattr(config, "attn_logit_softcapping", None) is None


def find_fixed_positions(model: Any) -> int | None:
    """Return the number of tokens up to which rotary embeddings do not depend on the longest row of the call; None if
    they never do."""
    config = model.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    limits = [
        rope["original_max_position_embeddings"]
        for rope in ([ropes] if "rope_type" in ropes else ropes.values())
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def check_context_parallel(model: Any, context: int, tensor: int = 1) -> None:
    """Raise an ``EngineError`` if ``context`` ranks cannot share the model's sequences."""
    if not can_pack(model):
        name = type(model).__name__
        raise EngineError(
            f"{name} mixes tokens by other means than attention, or uses longrope: context_parallel_size must be 1"
        )
    heads = model.config.get_text_config().num_attention_heads
    if (heads // tensor) % context:
        raise EngineError(
            f"context_parallel_size {context} cannot share {heads} attention heads over tensor_parallel_size {tensor}"
        )


def packed_attention(  # noqa: PLR0913 - Transformers' signature
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Any, None]:
    """Compute causal attention within each document, with the signature of ``transformers.AttentionInterface``.

    ``query`` is ``[rows, heads, tokens, dim]``, ``key`` and ``value`` ``[rows, key-value heads, tokens, dim]``;
    ``documents`` lists the first row's, then the next row's. Returns ``[rows, tokens, heads, dim]`` and None."""
    documents, window = options.pop("documents", None), options.pop("sliding_window", None)
    unsupported = [name for name in options.keys() - _HARMLESS if not (options[name] is None or options[name] is False)]
    causal = options.get("is_causal") is not False and getattr(module, "is_causal", True)
    if documents is None:
        raise EngineError(f"{type(module).__name__} does not forward 'documents': the model cannot be packed")
    if unsupported or attention_mask is not None or dropout or not causal:
        reason = ", ".join(unsupported) or "a mask, dropout or non-causal attention"
        raise EngineError(f"{type(module).__name__} needs {reason}, which packed attention does not support")
    if documents.group is not None:
        query, key, value = exchange_tokens_for_heads(query, key, value, documents.group)
    rows = len(query)
    query, key, value = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query, key, value))
    output = attend(query, key, value, documents, scaling, window)[0].unflatten(0, (rows, -1))
    return output if documents.group is None else _exchange(output, documents.group), None


AttentionInterface.register(NAME, packed_attention)


def attend(
    query: Any, key: Any, value: Any, documents: Documents, scaling: float | None = None, window: int | None = None
) -> Any:
    """Compute :func:`packed_attention` for one whole row: ``[1, tokens, heads, dim]``."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        longest, grouped = max(documents.lengths), query.shape[1] != key.shape[1]
        if grouped and not _HAS_GQA:
            key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
        return varlen_attn(
            *(tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)),
            documents.bounds,
            documents.bounds,
            longest,
            longest,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            **({"enable_gqa": grouped} if _HAS_GQA else {}),
        )[None]
    runs = [(len(list(run)), length) for length, run in groupby(documents.lengths)]  # neighbours of equal length
    # Split, not sliced: one concatenation then joins the gradients of the parts.
    parts = zip(
        *(tensor[0].split([count * length for count, length in runs], dim=1) for tensor in (query, key, value)),
        strict=True,
    )
    outputs = [_run(part, run, scaling, window) for part, run in zip(parts, runs, strict=True)]
    return torch.cat(outputs)[None]


def _run(part: tuple[Any, Any, Any], run: tuple[int, int], scaling: float | None, window: int | None) -> Any:
    query, key, value = (tensor.unflatten(1, run).transpose(0, 1) for tensor in part)
    mask, length = None, run[1]
    if window is not None and length > window:
        at = torch.arange(length, device=query.device)
        mask = (at[:, None] >= at) & (at[:, None] < at + window)
    grouped = query.shape[1] != key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).flatten(0, 1)


# -- context parallel: each rank has all heads of its tokens, and needs all tokens of its heads ------------------------


def exchange_tokens_for_heads(query: Any, key: Any, value: Any, group: Any) -> list[Any]:
    """Exchange all heads of a rank's tokens for all tokens of its share of the heads: ``[rows, heads / ranks, tokens *
    ranks, dim]`` (Ulysses, arXiv:2309.14509). If there are too few key-value heads, each query head gets a copy."""
    ranks, heads = dist.get_world_size(group), query.shape[1]
    if heads % ranks:
        raise EngineError(f"{ranks} context-parallel ranks cannot share {heads} attention heads")
    if key.shape[1] % ranks:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    return [_exchange(tensor, group) for tensor in (query, key, value)]


def _exchange(tensor: Any, group: Any) -> Any:
    parts = tensor.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0).contiguous()
    received = all_to_all_single_autograd(parts, None, None, group)
    return received.movedim(0, 2).flatten(2, 3)
