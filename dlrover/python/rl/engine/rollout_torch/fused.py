# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the forward pass and the cache that it reads, whose layout is chosen for it.
"""A forward pass for Llama-like models with fewer and larger operations than transformers has, and its key-value cache
with one slot per row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.loading import CausalLM
from dlrover.python.rl.engine.rollout_torch.decoder import ROW_GROUP, Ids, Prefix, StepGraphs, WeightStore, to_device

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROTARIES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on a sequence's length."""

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_PARTS = (_QUERY_KEY_VALUE, ("self_attn.o_proj",), _GATE_UP, ("mlp.down_proj",))
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


_MIN_SAVING = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Cache entries that a further segment must save: three more operations take as long as reading them."""

_ALIGNED = 16
"""CUDA's attention copies a mask in each layer unless its rows begin at multiples of 16 entries."""


@dataclass(frozen=True)
class Segment:
    """Rows ``start`` to ``stop``, which attend in one operation."""

    start: int
    stop: int
    longest: int  # tokens of the longest row
    bias: Any  # `[rows * kv_heads, 1, longest]`, masks entries beyond a row's end; None if all are equally long
    values: Any  # on a CPU: indices of the values that each query reads, int32 `[rows * heads * longest]`
    begins: Any  # where each query's indices begin in `values`, int32 `[rows * heads]`


class SlotCache:
    """Keys and values of all layers: ``[layers, 2, rows, kv_heads, length, head_dim]``, allocated once. Rows 0 to
    ``len(lengths) - 1`` are in use. Beyond its length a row has finite entries of earlier sequences, always masked."""

    def __init__(
        self, shape: tuple[int, int, int, int, int, int], dtype: Any, memory: DeviceMemory, owner: str
    ) -> None:
        self.lengths: list[int] = []
        self._data = memory.allocate(owner, "kv_cache", shape, dtype)
        _, _, rows, heads, length, _ = shape
        self.rows, self._heads, self._entry = rows, heads, 2 * heads * shape[-1]
        self._min_saving = _MIN_SAVING.get(self._data.device.type, 1 << 24)
        kinds = torch.arange(2).view(1, 2, 1)
        starts = ((kinds * rows + torch.arange(rows).view(rows, 1, 1)) * heads + torch.arange(heads)) * length
        self.flat = [layer.view(-1, shape[-1]) for layer in self._data]
        """All keys and values of each layer: ``[entries, head_dim]``."""
        self._parts = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self._data]
        self._starts = starts.to(memory.device)
        """First entry of each row, key or value, and head in a layer: ``[rows, 2, kv_heads]``."""
        hidden = torch.full((length + _ALIGNED,), -torch.inf, dtype=dtype)
        self._mask = torch.cat([torch.zeros(length, dtype=dtype), hidden]).to(memory.device)
        """The mask of a row of ``n`` tokens begins ``n`` before the infinities."""

    def add_row(self, past: Any) -> None:
        """Fill the next row with ``past``: ``[layers, 2, kv_heads, seq, head_dim]``."""
        self._data[:, :, len(self.lengths), :, : past.shape[3]] = past
        self.lengths.append(past.shape[3])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row ``i`` what ``rows[i]`` was, in ascending order: no row may be overwritten before it is read."""
        for row, old in enumerate(rows):
            if row != old:
                length = self.lengths[old]
                self._data[:, :, row, :, :length] = self._data[:, :, old, :, :length]
        self.lengths = [self.lengths[old] for old in rows]

    def grow(self) -> list[int]:
        """Make each row a token longer; returns the positions of the new tokens."""
        positions = self.lengths
        self.lengths = [length + 1 for length in positions]
        return positions

    def indices(self, positions: Any) -> Any:
        """Return the entries ``[rows, entries]`` that :meth:`write` fills at positions ``[rows]`` of the first rows."""
        return (self._starts[: len(positions)] + positions.view(-1, 1, 1)).flatten(1)

    def write(self, layer: int, indices: Any, entries: Any) -> None:
        """Store the new keys and values of one layer: ``[rows, 2 * kv_heads, head_dim]``."""
        self.flat[layer].index_put_((indices,), entries)

    def read(self, layer: int, part: Segment) -> tuple[Any, Any]:
        """Return keys and values of a segment, views ``[rows * kv_heads, longest, head_dim]``."""
        rows, (keys, values) = slice(part.start * self._heads, part.stop * self._heads), self._parts[layer]
        return keys[rows, : part.longest], values[rows, : part.longest]

    def segments(self, heads: int) -> list[Segment]:
        """Divide the rows in use where lengths differ much; each row has ``heads`` queries."""
        spans: list[tuple[int, int, int]] = []
        for start in range(0, len(self.lengths), ROW_GROUP):
            lengths, begin = self.lengths[start : start + ROW_GROUP], start
            longest = max(lengths)
            if spans and abs(spans[-1][2] - longest) * len(lengths) * self._entry < self._min_saving:
                begin, _, previous = spans.pop()
                longest = max(longest, previous)
            spans.append((begin, start + len(lengths), longest))
        bias, longest = None, max(self.lengths)
        if min(self.lengths) < longest:  # minus infinity beyond each row's length, else 0
            offsets = [self._data.shape[4] - length for length in self.lengths for _ in range(self._heads)]
            bias = self._windows(longest, torch.tensor(offsets, device=self._mask.device))
        segments, sharing = [], heads // self._heads  # queries that share one head's keys and values
        for start, stop, longest in spans:
            hidden, values, begins = None, None, None
            if bias is not None:
                hidden = bias[start * self._heads : stop * self._heads, :, :longest]
            if self._data.device.type == "cpu":
                first = self._starts[start:stop, 1].to(torch.int32).view(-1, 1, 1).expand(-1, sharing, 1)
                values = (first + torch.arange(longest, dtype=torch.int32)).flatten()
                begins = torch.arange(0, len(values), longest, dtype=torch.int32)
            segments.append(Segment(start, stop, longest, hidden, values, begins))
        return segments

    def whole(self, positions: Any, longest: int) -> Segment:
        """Return the first rows as one segment, up to positions ``[rows]`` that only the device has."""
        begins = (self._data.shape[4] - 1 - positions).repeat_interleave(self._heads)
        return Segment(0, len(positions), longest, self._windows(longest, begins)[..., :longest], None, None)

    def _windows(self, longest: int, begins: Any) -> Any:
        """Return the masks that begin at these entries, ``[rows * kv_heads, 1, aligned longest]``."""
        return self._mask.unfold(0, -(-longest // _ALIGNED) * _ALIGNED, 1).index_select(0, begins)[:, None]


def is_supported(lm: CausalLM) -> bool:
    """Return True if this forward pass computes the same as the model's."""
    config, names = lm.model.config, {name for name, _ in lm.named_weights()}
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) is not None
    if kinds is not None:
        slides = any(kind != "full_attention" for kind in kinds)
    if slides or config.model_type not in _FAMILIES or config.hidden_act != "silu":
        return False
    has_rotary = config.rope_parameters.get("rope_type", "default") in _ROTARIES
    return has_rotary and {name for group in _groups(config.num_hidden_layers, names) for name in group} == names


def _groups(layers: int, names: set[str]) -> Iterator[tuple[str, ...]]:
    """Iterate over groups of weights, by name, that are used as one tensor."""
    yield (_EMBEDDING,)
    for layer in range(layers):
        head = f"model.layers.{layer}."
        for part in _PARTS:
            yield tuple(f"{head}{name}.weight" for name in part)
            biases = tuple(f"{head}{name}.bias" for name in part)
            if names.issuperset(biases):
                yield biases
        for norm in (*_NORMS, *_HEAD_NORMS):
            if norm in _NORMS or f"{head}{norm}.weight" in names:
                yield (f"{head}{norm}.weight",)
    yield (_NORM,)
    if _HEAD in names:
        yield (_HEAD,)


@dataclass(frozen=True, eq=False)
class _Shape:
    """Sizes and constants of a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    means: tuple[Any, Any] | None  # for means by a product: `eps` `[1, 1]` and `1 / width` `[width, 1]`


@dataclass(frozen=True, eq=False)
class _Layer:
    """Views of a layer's weights: matrices ``[out, in]``, ``out`` and ``down`` transposed, with their bias or None."""

    before: Any
    qkv: tuple[Any, Any]
    out: tuple[Any, Any]
    after: Any
    gate_up: tuple[Any, Any]
    down: tuple[Any, Any]
    head_norms: tuple[Any, Any] | None


class FusedDecoder:
    """A decoder with the methods of :class:`HuggingFaceDecoder`, for models that :func:`is_supported` accepts; copies
    their weights. Query, key and value are one product, gate and up another. Weights and cache may fill ``share`` of
    the device. With ``graphs`` steps are CUDA graphs."""

    def __init__(
        self, lm: CausalLM, dtype: Any, memory: DeviceMemory, owner: str, share: float, graphs: bool = False
    ) -> None:
        named, config = dict(lm.named_weights()), lm.model.config
        groups = _groups(config.num_hidden_layers, set(named))
        self.store = WeightStore([[(name, named[name]) for name in group] for group in groups], dtype, memory, owner)
        self.capacity = 0
        heads, eps, means = config.num_attention_heads, config.rms_norm_eps, None
        if dtype == torch.float32 and self.store.device.type == "cpu":
            means = torch.tensor([[eps]]), torch.full((config.hidden_size, 1), 1.0 / config.hidden_size)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._shape = _Shape(config.num_hidden_layers, heads, config.num_key_value_heads, head_dim, eps, means)
        rotary = lm.model.model.rotary_emb
        self._frequencies, self._scaling = rotary.inv_freq.float().cpu().clone(), float(rotary.attention_scaling)
        self._share, self._records = share, graphs
        self._cache: SlotCache | None = None
        self._rotations: tuple[Any, Any] = (None, None)
        self.bind()

    def bind(self) -> None:
        self._record()
        self._layers: list[_Layer] = []
        if self.store.place == "cuda":
            self._layers = [self._layer(f"model.layers.{layer}.") for layer in range(self._shape.layers)]

    def _layer(self, head: str) -> _Layer:
        def linear(part: Sequence[str]) -> tuple[Any, Any]:
            biases = [f"{head}{name}.bias" for name in part]
            bias = self.store.fused(*biases) if biases[0] in self.store.views else None
            return self.store.fused(*(f"{head}{name}.weight" for name in part)), bias

        views = self.store.views
        norms = [views.get(f"{head}{norm}.weight") for norm in _HEAD_NORMS]
        qkv, out, gate_up, down = map(linear, _PARTS)
        before, after = (views[f"{head}{norm}.weight"] for norm in _NORMS)
        head_norms = (norms[0], norms[1]) if norms[0] is not None else None
        return _Layer(before, qkv, (out[0].t(), out[1]), after, gate_up, (down[0].t(), down[1]), head_norms)

    def allocate(self, rows: int, length: int) -> int:
        self.clear()
        shape = self._shape
        dtype, memory = self.store.dtype, self.store.memory
        row_bytes = shape.layers * 2 * shape.kv_heads * length * shape.head_dim * int(dtype.itemsize)
        free_bytes = memory.free_bytes(self._share)
        if free_bytes is not None:
            rows = max(1, min(rows, free_bytes // row_bytes))
        sizes = (shape.layers, 2, rows, shape.kv_heads, length, shape.head_dim)
        self._cache = SlotCache(sizes, dtype, memory, self.store.owner)
        self.capacity = length
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        # By position, `[length, head_dim]` each; the first half of the sines is negated.
        tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        self._rotations = tables[0].to(memory.device, dtype), tables[1].to(memory.device, dtype)
        self._record()
        return rows

    def clear(self) -> None:
        self._cache, self.capacity, self._rotations = None, 0, (None, None)
        self._record()

    def _record(self) -> None:
        """Drop recorded steps, since weights or cache have moved."""
        self._graphs: StepGraphs | None = None
        if self._records and self._cache is not None:
            self._graphs = StepGraphs(self._step, self._cache.rows, self.capacity, self.store.device)

    def prefill(self, sequences: Sequence[Ids]) -> list[Prefix]:
        lengths = [len(tokens) for tokens in sequences]
        # Padded on the right, which causal attention masks.
        padded = np.zeros((len(sequences), max(lengths)), dtype=np.int64)
        for row, tokens in enumerate(sequences):
            padded[row, : len(tokens)] = tokens
        hidden = functional.embedding(torch.from_numpy(padded).to(self.store.device), self.store.views[_EMBEDDING])
        cos, sin = self._rotations
        rotations = cos[: max(lengths)], sin[: max(lengths)]
        last, pasts = (torch.arange(len(lengths)), torch.tensor(lengths) - 1), []
        for layer in self._layers:
            attended, past = self._attend_sequences(layer, hidden, rotations)
            if layer is self._layers[-1]:
                hidden, attended = hidden[last], attended[last]
            _add_product(hidden.flatten(0, -2), attended.flatten(0, -2), layer.out)
            self._feed_forward(layer, hidden.flatten(0, -2))
            pasts.append(past)
        logits, whole = self._logits(hidden), torch.stack(pasts)
        return [Prefix(length, whole[:, :, row, :, :length], logits[row]) for row, length in enumerate(lengths)]

    def add_rows(self, prefixes: Sequence[Prefix]) -> None:
        for prefix in prefixes:
            self._slots.add_row(prefix.past)

    def select_rows(self, rows: Sequence[int]) -> None:
        if self._cache is not None:
            self._cache.select_rows(rows)

    def step(self, tokens: Any) -> Any:
        positions = self._slots.grow()
        if self._graphs is not None:
            return self._graphs(tokens, positions)
        inputs = torch.stack([to_device(each, self.store.device) for each in (tokens, torch.tensor(positions))])
        return self._advance(inputs, self._slots.segments(self._shape.heads))

    def _step(self, inputs: Any, longest: int) -> Any:
        return self._advance(inputs, [self._slots.whole(inputs[1], longest)])

    def _advance(self, inputs: Any, segments: Sequence[Segment]) -> Any:
        """Return the logits after one token of each row; ``inputs`` ``[2, rows]`` are tokens and their positions."""
        tokens, positions = inputs
        indices = self._slots.indices(positions)
        cos, sin = self._rotations
        rotations = cos[positions][:, None], sin[positions][:, None]
        hidden = functional.embedding(tokens, self.store.views[_EMBEDDING])
        for index, layer in enumerate(self._layers):
            heads = self._heads(layer, self._rms_norm(hidden, layer.before), rotations)
            self._slots.write(index, indices, heads[:, self._shape.heads :])
            _add_product(hidden, self._attend(index, heads, segments), layer.out)
            self._feed_forward(layer, hidden)
        return self._logits(hidden)

    @property
    def _slots(self) -> SlotCache:
        assert self._cache is not None, "allocate() comes first"
        return self._cache

    def _rms_norm(self, hidden: Any, weight: Any) -> Any:
        """Apply RMSNorm to ``[..., width]``; on a CPU in float32 a product computes the means in half the time."""
        if self._shape.means is None or len(weight) != len(self._shape.means[1]):
            return functional.rms_norm(hidden, weight.shape, weight, self._shape.eps)
        eps, averages = self._shape.means
        rows = hidden.reshape(-1, len(weight))
        means = torch.addmm(eps, rows * rows, averages)
        return (rows * means.rsqrt_()).mul_(weight).view_as(hidden)

    def _heads(self, layer: _Layer, normed: Any, rotations: tuple[Any, Any]) -> Any:
        """Return rotated queries and keys, and values: ``[..., heads + 2 * kv_heads, head_dim]``."""
        shape = self._shape
        heads = functional.linear(normed, *layer.qkv).unflatten(-1, (-1, shape.head_dim))
        rotated = heads[..., : shape.heads + shape.kv_heads, :]
        if layer.head_norms is not None:
            rotated[..., : shape.heads, :] = self._rms_norm(rotated[..., : shape.heads, :], layer.head_norms[0])
            rotated[..., shape.heads :, :] = self._rms_norm(rotated[..., shape.heads :, :], layer.head_norms[1])
        cos, sin = rotations
        # Both halves of the last dimension are swapped; on a device roll would copy tensors that are not contiguous.
        on_cpu, half = rotated.device.type == "cpu", shape.head_dim // 2
        swapped = rotated.roll(half, dims=-1) if on_cpu else rotated.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        rotated.mul_(cos).addcmul_(swapped, sin)
        return heads

    def _attend(self, index: int, heads: Any, segments: Sequence[Segment]) -> Any:
        """Attend from one new token per row over the cache: ``[rows, heads * head_dim]``."""
        queries = heads[:, : self._shape.heads].unflatten(1, (self._shape.kv_heads, -1))
        attend = self._by_products if self.store.dtype == torch.float32 else self._by_kernel
        outputs = [attend(index, queries[part.start : part.stop], part) for part in segments]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).reshape(len(heads), -1)

    def _by_kernel(self, index: int, queries: Any, part: Segment) -> Any:
        """Attend from ``queries`` ``[rows, kv_heads, sharing, head_dim]`` by a kernel with scores in float32."""
        keys, values = (entries.unflatten(0, queries.shape[:2]) for entries in self._slots.read(index, part))
        mask = None if part.bias is None else part.bias.unflatten(0, queries.shape[:2])
        return functional.scaled_dot_product_attention(queries, keys, values, mask)

    def _by_products(self, index: int, queries: Any, part: Segment) -> Any:
        """Attend by matrix products, which are faster in float32."""
        keys, values = self._slots.read(index, part)
        queries = queries.reshape(len(keys), -1, queries.shape[-1])
        bias, counts = (queries.new_empty((1, 1, 1)), 0) if part.bias is None else (part.bias, 1)  # of 0: not read
        scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), beta=counts, alpha=queries.shape[-1] ** -0.5)
        weights = torch.softmax(scores, dim=-1)
        if part.values is None:
            return torch.bmm(weights, values)
        # A CPU's kernel for weighted sums of rows prefetches; the product takes two to three times as long.
        flat = self._slots.flat[index]
        summed = torch.embedding_bag(flat, part.values, part.begins, per_sample_weights=weights.view(-1))
        return summed[0].view_as(queries)

    def _attend_sequences(self, layer: _Layer, hidden: Any, rotations: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return attention's output ``[rows, seq, heads * head_dim]`` for ``[rows, seq, hidden]``, and keys and values
        ``[2, rows, kv_heads, seq, head_dim]``."""
        shape = self._shape
        cos, sin = rotations
        heads = self._heads(layer, self._rms_norm(hidden, layer.before), (cos[:, None], sin[:, None])).transpose(1, 2)
        queries, keys, values = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        grouped = shape.heads != shape.kv_heads
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
        return attended.transpose(1, 2).flatten(2), torch.stack([keys, values])

    def _feed_forward(self, layer: _Layer, hidden: Any) -> None:
        weight, bias = layer.gate_up
        normed = self._rms_norm(hidden, layer.after).t()
        both = torch.mm(weight, normed) if bias is None else torch.addmm(bias[:, None], weight, normed)
        gate, up = both.chunk(2)
        _add_product(hidden, functional.silu(gate).mul_(up).t(), layer.down)

    def _logits(self, hidden: Any) -> Any:
        views = self.store.views
        return functional.linear(self._rms_norm(hidden, views[_NORM]), views.get(_HEAD, views[_EMBEDDING]))


def _add_product(hidden: Any, inputs: Any, linear: tuple[Any, Any]) -> None:
    """Add the output of a linear layer with transposed weight to ``hidden`` ``[rows, out]``, in place."""
    weight, bias = linear
    hidden.addmm_(inputs, weight)
    if bias is not None:
        hidden.add_(bias)
