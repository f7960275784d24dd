# SPDX-License-Identifier: Apache-2.0
"""A forward pass for Llama-like models with fewer and larger operations than that of transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.loading import CausalLM
from dlrover.python.rl.engine.rollout_torch.cache import Segment, SlotCache
from dlrover.python.rl.engine.rollout_torch.decoder import Ids, Prefix, StepGraphs, WeightStore, to_device

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROTARIES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of a sequence."""

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_PARTS = (_QUERY_KEY_VALUE, ("self_attn.o_proj",), _GATE_UP, ("mlp.down_proj",))
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def is_supported(lm: CausalLM) -> bool:
    """Return True if this forward pass computes what the model's own does."""
    config, names = lm.model.config, {name for name, _ in lm.named_weights()}
    if config.model_type not in _FAMILIES or config.hidden_act != "silu":
        return False
    if config.rope_parameters.get("rope_type", "default") not in _ROTARIES or _has_sliding_window(config):
        return False
    groups = list(_groups(config.num_hidden_layers, names))
    return {name for group in groups for name in group} == names


def _has_sliding_window(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def _groups(layers: int, names: set[str]) -> Iterator[tuple[str, ...]]:
    """The names of a model's weights, grouped by what is used as one tensor."""
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


@dataclass(frozen=True)
class _Shape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, config: Any) -> "_Shape":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return cls(config.num_hidden_layers, heads, kv_heads, head_dim, config.rms_norm_eps)


@dataclass(frozen=True, eq=False)
class _Layer:
    """Views: matrices ``[out, in]``, but ``out`` and ``down`` transposed; each with its bias or None."""

    before: Any
    qkv: tuple[Any, Any]
    out: tuple[Any, Any]
    after: Any
    gate_up: tuple[Any, Any]
    down: tuple[Any, Any]
    head_norms: tuple[Any, Any] | None


class FusedDecoder:
    """Implements ``Decoder`` for models for which :func:`is_supported` is True; their weights are copied.

    Query, key and value are one product, gate and up another. Weights and cache may fill ``share`` of the device. With
    ``graphs`` steps are recorded.
    """

    def __init__(  # noqa: PLR0913 - as HuggingFaceDecoder, and one
        self, lm: CausalLM, dtype: Any, memory: DeviceMemory, owner: str, share: float, graphs: bool = False
    ) -> None:
        named = dict(lm.named_weights())
        groups = _groups(lm.model.config.num_hidden_layers, set(named))
        self.store = WeightStore([[(name, named[name]) for name in group] for group in groups], dtype, memory, owner)
        self.capacity = 0
        self._shape, rotary = _Shape.of(lm.model.config), lm.model.model.rotary_emb
        self._frequencies, self._scaling = rotary.inv_freq.float().cpu().clone(), float(rotary.attention_scaling)
        self._dtype, self._memory, self._owner, self._share = dtype, memory, owner, share
        self._cache: SlotCache | None = None
        self._records = graphs
        self._cos: Any = None
        self._sin: Any = None
        self._no_bias = torch.zeros((1, 1, 1), dtype=dtype, device=memory.device)
        width, self._averages = lm.model.config.hidden_size, None
        if dtype == torch.float32 and self._no_bias.device.type == "cpu":
            self._averages, self._eps = torch.full((width, 1), 1.0 / width), torch.tensor([[self._shape.eps]])
        self.bind()

    # -- the interface ------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        self._layers: list[_Layer] = []
        self._record()
        self._embedding = self._norm = self._head = None
        if self.store.place == "cuda":
            views = self.store.views
            self._embedding, self._norm = views[_EMBEDDING], views[_NORM]
            self._head = views.get(_HEAD, self._embedding)
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
        row_bytes = shape.layers * 2 * shape.kv_heads * length * shape.head_dim * int(self._dtype.itemsize)
        free_bytes = self._memory.free_bytes(self._share)
        if free_bytes is not None:
            rows = max(1, min(rows, free_bytes // row_bytes))
        sizes = (shape.layers, 2, rows, shape.kv_heads, length, shape.head_dim)
        self._cache = SlotCache(sizes, self._dtype, self._memory, self._owner)
        self.capacity = length
        self._cos, self._sin = self._rotations(length)
        self._record()
        return rows

    def clear(self) -> None:
        self._cache, self.capacity = None, 0
        self._cos = self._sin = None
        self._record()

    def _record(self) -> None:
        """Steps are recorded again: weights or cache are at other addresses."""
        self._graphs: StepGraphs | None = None
        if self._records and self._cache is not None:
            self._graphs = StepGraphs(self._step, self._cache.rows, self.capacity, self._memory.device)

    def prefill(self, sequences: Sequence[Ids]) -> list[Prefix]:
        lengths = [len(tokens) for tokens in sequences]
        # Padded on the right: causal attention masks what comes later.
        padded = np.zeros((len(sequences), max(lengths)), dtype=np.int64)
        for row, tokens in enumerate(sequences):
            padded[row, : len(tokens)] = tokens
        hidden = functional.embedding(torch.from_numpy(padded).to(self._memory.device), self._embedding)
        rotations = self._cos[: max(lengths)], self._sin[: max(lengths)]
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
        inputs = torch.stack([to_device(each, self._memory.device) for each in (tokens, torch.tensor(positions))])
        return self._advance(inputs, self._slots.segments(self._shape.heads))

    def _step(self, inputs: Any, longest: int) -> Any:
        """See ``graphs.Step``."""
        return self._advance(inputs, [self._slots.whole(inputs[1], longest)])

    def _advance(self, inputs: Any, segments: Sequence[Segment]) -> Any:
        """Logits after one token of each row; ``inputs`` ``[2, rows]`` are the tokens and their positions."""
        tokens, positions = inputs
        indices = self._slots.indices(positions)
        rotations = self._cos[positions][:, None], self._sin[positions][:, None]
        hidden = functional.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            heads = self._heads(layer, self._rms_norm(hidden, layer.before), rotations)
            self._slots.write(index, indices, heads[:, self._shape.heads :])
            _add_product(hidden, self._attend(index, heads, segments), layer.out)
            self._feed_forward(layer, hidden)
        return self._logits(hidden)

    # -- the forward pass ---------------------------------------------------------------------------------------------

    @property
    def _slots(self) -> SlotCache:
        assert self._cache is not None, "allocate() comes first"
        return self._cache

    def _rotations(self, length: int) -> tuple[Any, Any]:
        """Cosines and sines by position, ``[length, head_dim]`` each; the first half of the sines is negated."""
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return tables[0].to(self._memory.device, self._dtype), tables[1].to(self._memory.device, self._dtype)

    def _rms_norm(self, hidden: Any, weight: Any) -> Any:
        """RMSNorm of ``[..., width]``; on a CPU in float32 the means are a product, which halves the operations."""
        if self._averages is None or len(weight) != len(self._averages):
            return functional.rms_norm(hidden, weight.shape, weight, self._shape.eps)
        rows = hidden.reshape(-1, len(weight))
        means = torch.addmm(self._eps, rows * rows, self._averages)
        return (rows * means.rsqrt_()).mul_(weight).view_as(hidden)

    def _heads(self, layer: _Layer, normed: Any, rotations: tuple[Any, Any]) -> Any:
        """Queries, keys (both rotated) and values: ``[..., heads + 2 * kv_heads, head_dim]``."""
        shape = self._shape
        heads = functional.linear(normed, *layer.qkv).unflatten(-1, (-1, shape.head_dim))
        rotated = heads[..., : shape.heads + shape.kv_heads, :]
        if layer.head_norms is not None:
            rotated[..., : shape.heads, :] = self._rms_norm(rotated[..., : shape.heads, :], layer.head_norms[0])
            rotated[..., shape.heads :, :] = self._rms_norm(rotated[..., shape.heads :, :], layer.head_norms[1])
        cos, sin = rotations
        swapped = _swap_halves(rotated)
        rotated.mul_(cos).addcmul_(swapped, sin)
        return heads

    def _attend(self, index: int, heads: Any, segments: Sequence[Segment]) -> Any:
        """Attention of one new token per row over the cache: ``[rows, heads * head_dim]``."""
        queries = heads[:, : self._shape.heads].unflatten(1, (self._shape.kv_heads, -1))
        attend = self._by_products if self._dtype == torch.float32 else self._by_kernel
        outputs = [attend(index, queries[part.start : part.stop], part) for part in segments]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).reshape(len(heads), -1)

    def _by_kernel(self, index: int, queries: Any, part: Segment) -> Any:
        """Attention of ``queries`` ``[rows, kv_heads, sharing, head_dim]`` by a kernel that keeps the scores in
        float32."""
        keys, values = (entries.unflatten(0, queries.shape[:2]) for entries in self._slots.read(index, part))
        mask = None if part.bias is None else part.bias.unflatten(0, queries.shape[:2])
        return functional.scaled_dot_product_attention(queries, keys, values, mask)

    def _by_products(self, index: int, queries: Any, part: Segment) -> Any:
        """The same by matrix products, which are faster in float32."""
        keys, values = self._slots.read(index, part)
        queries = queries.reshape(len(keys), -1, queries.shape[-1])
        bias, counts = (self._no_bias, 0) if part.bias is None else (part.bias, 1)
        scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), beta=counts, alpha=queries.shape[-1] ** -0.5)
        weights = torch.softmax(scores, dim=-1)
        if part.values is None:
            return torch.bmm(weights, values)
        # A CPU's kernel for weighted sums of rows prefetches; the product takes two to three times as long.
        entries = self._slots.entries(index)
        summed = torch.embedding_bag(entries, part.values, part.begins, per_sample_weights=weights.view(-1))
        return summed[0].view_as(queries)

    def _attend_sequences(self, layer: _Layer, hidden: Any, rotations: tuple[Any, Any]) -> tuple[Any, Any]:
        """From ``[rows, seq, hidden]`` to attention's output ``[rows, seq, heads * head_dim]``, and keys and values
        ``[2, rows, kv_heads, seq, head_dim]``."""
        shape = self._shape
        cos, sin = rotations
        heads = self._heads(layer, self._rms_norm(hidden, layer.before), (cos[:, None], sin[:, None])).transpose(1, 2)
        queries, keys, values = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
        )
        return attended.transpose(1, 2).flatten(2), torch.stack([keys, values])

    def _feed_forward(self, layer: _Layer, hidden: Any) -> None:
        weight, bias = layer.gate_up
        normed = self._rms_norm(hidden, layer.after).t()
        both = torch.mm(weight, normed) if bias is None else torch.addmm(bias[:, None], weight, normed)
        gate, up = both.chunk(2)
        _add_product(hidden, functional.silu(gate).mul_(up).t(), layer.down)

    def _logits(self, hidden: Any) -> Any:
        return functional.linear(self._rms_norm(hidden, self._norm), self._head)


def _swap_halves(heads: Any) -> Any:
    """Both halves of the last dimension of ``[..., head_dim]`` in the other order."""
    if heads.device.type == "cpu":
        return heads.roll(heads.shape[-1] // 2, dims=-1)
    return heads.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # roll copies what is not contiguous before


def _add_product(hidden: Any, inputs: Any, linear: tuple[Any, Any]) -> None:
    """Add the output of a linear layer with transposed weight to ``hidden`` ``[rows, out]``, in place."""
    weight, bias = linear
    hidden.addmm_(inputs, weight)
    if bias is not None:
        hidden.add_(bias)
