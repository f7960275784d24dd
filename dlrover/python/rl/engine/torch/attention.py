"""Attention over packed documents, for any Hugging Face model that lets its attention be chosen.

Each document attends to itself alone. On CUDA in half precision that is one FlashAttention call for all documents; else
one call for each run of documents of equal length: SDPA, or what is faster on a host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.torch.bands import band_attention, suits_bands

NAME = "dlrover_packed"
"""What a model's ``attn_implementation`` has to be."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that mix tokens by attention alone, as :func:`packed_attention` can do it."""

_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "is_causal"})


@dataclass(frozen=True, eq=False)
class Documents:
    """How a packed row divides; given to the model as its argument ``documents``.

    Attributes:
        lengths: tokens of each document.
        device: where the row is.
        group: the process group whose ranks hold equal parts of the row (context parallel); None: the row is whole.
    """

    lengths: tuple[int, ...]
    device: str = "cpu"
    group: Any = None

    @cached_property
    def bounds(self) -> Any:
        """int32 ``[documents + 1]``: where each begins, and where the last ends."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Neighbours of equal length: how many they are, how long each is."""
        for length, run in groupby(self.lengths):
            yield len(list(run)), length


def can_pack(model: Any) -> bool:
    """Whether the model's documents can be packed: every layer is attention that ``attn_implementation`` chooses, of a
    kind that :func:`packed_attention` can do."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    chosen = bool(getattr(model, "_supports_attention_backend", False)) and not getattr(model, "_is_stateful", False)
    return chosen and kinds <= LAYER_TYPES and getattr(config, "attn_logit_softcapping", None) is None


def check_sharing(model: Any, context: int, tensor: int = 1) -> None:
    """Refuse a model whose sequences ``context`` ranks cannot share, with its heads split over ``tensor`` ranks.

    Raises:
        EngineError: not all of its layers attend as :func:`packed_attention` does, or its heads cannot be shared out.
    """
    if not can_pack(model):
        name = type(model).__name__
        raise EngineError(f"{name} mixes tokens by other means than attention: context_parallel_size has to be 1")
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
    """Causal attention within each document, in the form that Transformers calls.

    Args:
        module: the attention layer.
        query: ``[rows, heads, tokens, dim]``; the documents are those of the first row, then those of the next.
        key: ``[rows, key-value heads, tokens, dim]``.
        value: as ``key``.
        attention_mask: has to be None.
        dropout: has to be 0.
        scaling: of the scores; the square root of ``1 / dim`` by default.
        options: ``documents``, ``sliding_window`` (tokens that a token sees, itself included), and what the model adds.

    Returns:
        ``[rows, tokens, heads, dim]``, and None.

    Raises:
        EngineError: the model wants attention of another kind, or did not hand ``documents`` on.
    """
    documents, window = options.pop("documents", None), options.pop("sliding_window", None)
    odd = [name for name, given in options.items() if name not in _HARMLESS and not (given is None or given is False)]
    causal = options.get("is_causal") is not False and getattr(module, "is_causal", True)
    if documents is None:
        raise EngineError(f"{type(module).__name__} is not told which documents are packed: the model cannot be packed")
    if odd or attention_mask is not None or dropout or not causal:
        what = ", ".join(odd) or "a mask, dropout or attention that is not causal"
        raise EngineError(f"{type(module).__name__} wants {what}, which attention over packed documents cannot do")
    if documents.group is not None:
        query, key, value = whole_rows(query, key, value, documents.group)
    rows = len(query)
    query, key, value = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query, key, value))
    found = attend(query, key, value, documents, scaling, window)[0].unflatten(0, (rows, -1))
    return found if documents.group is None else _to_tokens(found, documents.group), None


AttentionInterface.register(NAME, packed_attention)


def attend(  # noqa: PLR0913 - three tensors and how they attend
    query: Any, key: Any, value: Any, documents: Documents, scaling: float | None = None, window: int | None = None
) -> Any:
    """:func:`packed_attention` of one whole row: ``[1, tokens, heads, dim]``."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        longest = max(documents.lengths)
        return varlen_attn(
            *(tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)),
            documents.bounds,
            documents.bounds,
            longest,
            longest,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )[None]
    runs = list(documents.runs())
    # Split, not sliced: the gradients of the parts are put together at once then.
    parts = zip(
        *(tensor[0].split([count * length for count, length in runs], dim=1) for tensor in (query, key, value)),
        strict=True,
    )
    outputs = [_run(part, run, scaling, window) for part, run in zip(parts, runs, strict=True)]
    return torch.cat(outputs)[None]


def _run(part: tuple[Any, Any, Any], run: tuple[int, int], scaling: float | None, window: int | None) -> Any:
    """Attention of neighbours of equal length, which are a batch: ``[count * length, heads, dim]``."""
    query, key, value = (tensor.unflatten(1, run).transpose(0, 1) for tensor in part)
    mask, length = None, run[1]
    slides = window is not None and length > window
    if not slides and suits_bands(query):
        return band_attention(query, key, value, scaling).transpose(1, 2).flatten(0, 1)
    if slides:
        at = torch.arange(length, device=query.device)
        mask = (at[:, None] >= at) & (at[:, None] < at + window)
    grouped = query.shape[1] != key.shape[1]
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return found.transpose(1, 2).flatten(0, 1)


# -- context parallel: each rank has all heads of its tokens, and needs all tokens of its heads ------------------------


def whole_rows(query: Any, key: Any, value: Any, group: Any) -> list[Any]:
    """All tokens of this rank's share of the heads: ``[rows, heads / ranks, tokens * ranks, dim]`` each (Ulysses,
    arXiv:2309.14509). Where there are too few key-value heads to share out, each query head gets a copy of its own.

    Raises:
        EngineError: the heads cannot be shared out.
    """
    ranks, heads = dist.get_world_size(group), query.shape[1]
    if heads % ranks:
        raise EngineError(f"{ranks} context-parallel ranks cannot share {heads} attention heads")
    if key.shape[1] % ranks:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    return [_to_heads(tensor, group) for tensor in (query, key, value)]


def _to_heads(tensor: Any, group: Any) -> Any:
    parts = tensor.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0)
    return _Swap.apply(parts, group).movedim(0, 2).flatten(2, 3)


def _to_tokens(tensor: Any, group: Any) -> Any:
    parts = tensor.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0)
    return _Swap.apply(parts, group).movedim(0, 2).flatten(2, 3)


class _Swap(torch.autograd.Function):
    """Part ``i`` of rank ``j`` becomes part ``j`` of rank ``i``: ``[ranks, ...]``. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Any, group: Any) -> Any:
        ctx.group = group
        return _swap(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return _swap(gradient, ctx.group), None


def _swap(parts: Any, group: Any) -> Any:
    given = parts.contiguous()
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    return taken
