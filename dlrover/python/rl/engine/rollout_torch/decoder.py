# SPDX-License-Identifier: Apache-2.0
"""The store of a model's weights, a decoder for any causal language model with keys and values by the forward pass of
transformers, and steps of a decoder as CUDA graphs."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import DynamicCache

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.weights import DeviceKind, WeightSnapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.memory.offload import HostBlock
from dlrover.python.rl.engine.model.loading import CausalLM
from dlrover.python.rl.engine.model.model_shape import find_state_fault
from dlrover.python.rl.engine.model.spec import count_cache_bytes_per_token

_ALIGNMENT = 64
"""Bytes of a cache line: each group of tensors begins at a multiple."""


class WeightStore:
    """The weights of one engine, by their names in a Hugging Face checkpoint; floating-point tensors have ``dtype``.
    All weights of a dtype are views of one flat tensor, which offload moves. The tensors of a group have equal trailing
    dimensions and are contiguous: :meth:`fused` returns them as one. A copy stays in host memory, page-locked for CUDA,
    while the weights are on the device: until new ones are written, :meth:`cpu` copies nothing."""

    def __init__(
        self, groups: Iterable[Sequence[tuple[str, Any]]], dtype: Any, memory: DeviceMemory, owner: str
    ) -> None:
        self.place: DeviceKind = "meta"
        self.views: dict[str, Any] = {}  # empty at `meta`
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.memory, self.owner, self.dtype = memory, owner, dtype
        self._at: dict[str, tuple[Any, int]] = {}
        self._sizes: dict[Any, int] = {}
        self._flats: dict[Any, Any] = {}
        self._hosts: dict[Any, Any] = {}
        self._blocks: dict[Any, HostBlock] = {}  # the memory of the hosts
        self._hosts_are_current = False
        named: dict[str, Any] = {}
        for group in groups:
            kinds = [dtype if tensor.is_floating_point() else tensor.dtype for _, tensor in group]
            for kind in set(kinds):
                step = max(1, _ALIGNMENT // kind.itemsize)
                self._sizes[kind] = -(-self._sizes.get(kind, 0) // step) * step
            for (name, tensor), kind in zip(group, kinds, strict=True):
                self.shapes[name], self._at[name] = tuple(tensor.shape), (kind, self._sizes[kind])
                self._sizes[kind] += tensor.numel()
            named.update(group)
        self.cuda()
        for name, tensor in named.items():
            self.views[name].copy_(tensor.detach())

    @property
    def device(self) -> torch.device:
        """The device of the weights at ``cuda``."""
        return torch.device(self.memory.device)

    def fused(self, *names: str) -> Any:
        """Return the tensors of one group, concatenated along their first dimension, as a view."""
        kind, start = self._at[names[0]]
        rows = sum(self.shapes[name][0] for name in names)
        shape = (rows, *self.shapes[names[0]][1:])
        return self._flats[kind][start : start + torch.Size(shape).numel()].view(shape)

    def cpu(self) -> None:
        if self.place != "cuda":
            return
        if not self._hosts_are_current:
            self._allocate_hosts()
            for kind, flat in self._flats.items():
                self._hosts[kind].copy_(flat)
        self._settle(self._hosts, "cpu")

    def cuda(self) -> None:
        """Move to the device, or from ``meta`` allocate zeros. Weights that do not fit stay where they are."""
        if self.place == "cpu":
            moved = {kind: self.memory.bring(self.owner, "weights", flat) for kind, flat in self._flats.items()}
            self._settle(moved, "cuda")
            self._hosts_are_current = True
        elif self.place == "meta":
            sizes = self._sizes.items()
            flats = {kind: self.memory.allocate(self.owner, "weights", (size,), kind) for kind, size in sizes}
            self._settle(flats, "cuda")

    def host(self) -> None:
        """Allocate zeros in host memory; the weights are at ``meta``."""
        self._allocate_hosts()
        self._settle(self._hosts, "cpu")

    def _allocate_hosts(self) -> None:
        for kind, size in self._sizes.items():
            if kind not in self._hosts:
                self._blocks[kind] = HostBlock(size * kind.itemsize, self.device)
                self._hosts[kind] = self._blocks[kind].bytes.view(kind)

    def meta(self) -> None:
        self._flats, self._hosts, self._blocks, self.views, self.place = {}, {}, {}, {}, "meta"
        self._hosts_are_current = False

    def _settle(self, flats: dict[Any, Any], place: DeviceKind) -> None:
        self._flats, self.place = flats, place
        for name, shape in self.shapes.items():
            kind, start = self._at[name]
            self.views[name] = flats[kind][start : start + torch.Size(shape).numel()].view(shape)

    @torch.no_grad()
    def write(self, weights: WeightSnapshot) -> None:
        """Copy a checked snapshot into the weights, in place."""
        self._hosts_are_current = False
        if weights.lock_pages is not None and self.place == "cuda":
            weights.lock_pages(self.device)
        try:
            on_device = list[tuple[Any, Any]]()
            for name, view in self.views.items():
                tensor = weights.tensor(name, view.device)
                if tensor.device == view.device and weights.adapters is None:
                    on_device.append((view, tensor))
                else:
                    # Without waiting, another dtype would be copied to the device before the cast.
                    view.copy_(tensor, non_blocking=tensor.dtype == view.dtype)
            if on_device:  # one call takes a fraction of the time of many
                views, tensors = map(list, zip(*on_device, strict=True))
                torch._foreach_copy_(views, tensors)
        finally:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # it reads memory that the sender may use again


Ids = npt.NDArray[np.int64]

ROW_GROUP = 16
"""Number of adjacent rows of about the same age."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """A sequence that the model has read."""

    length: int
    past: Any  # keys and values in the decoder's layout
    logits: Any  # of the next token: `[vocab]`


def to_device(tensor: Any, device: torch.device | str) -> Any:
    """Copy a small tensor to the device, for which the host does not wait."""
    if tensor.is_cuda or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


Past = list[tuple[Any, Any]]
"""Keys and values of each layer, ``[rows, kv_heads, seq, head_dim]`` each."""


class HuggingFaceDecoder:
    """A model with a key-value cache of rows 0, 1, 2, ..., one sequence of up to ``capacity`` tokens each. Its weights
    move to a store. Rows are padded on the left to the longest, so all grow at the same end. The cache grows by copies:
    slower than ``FusedDecoder``, which has the same methods, but correct for all masks and positions. Weights and cache
    may fill ``share`` of the device."""

    def __init__(self, lm: CausalLM, dtype: Any, memory: DeviceMemory, owner: str, share: float) -> None:
        model = lm.model
        if fault := find_state_fault(model.config, model=model):
            raise EngineError(fault)
        self.capacity = 0
        self._pad, self._share, self._token_bytes = lm.pad_id, share, count_cache_bytes_per_token(lm, dtype)
        self._accepted = inspect.signature(model.forward).parameters
        self._attributes = dict(_attributes(lm))
        self.store = WeightStore([[pair] for pair in lm.named_weights()], dtype, memory, owner)
        self._model = model
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(memory.device)
        self.clear()
        self.bind()

    def bind(self) -> None:
        """Use the weights of ``store`` where they are; called after each move."""
        views = self.store.views if self.store.place == "cuda" else {}
        for name, attributes in self._attributes.items():
            tensor = views.get(name)
            if tensor is None:
                tensor = torch.empty(self.store.shapes[name], device="meta")
            for module, attribute in attributes:
                if attribute in module._parameters:
                    module._parameters[attribute] = torch.nn.Parameter(tensor, requires_grad=False)
                else:
                    module._buffers[attribute] = tensor

    def allocate(self, rows: int, length: int) -> int:
        """Prepare an empty cache for sequences of up to ``length`` tokens; returns its rows: ``rows``, or as many as
        fit twice, since the cache grows by copies."""
        self.clear()
        self.capacity = length
        free_bytes = self.store.memory.free_bytes(self._share)
        return rows if free_bytes is None else max(1, min(rows, free_bytes // (2 * length * self._token_bytes)))

    def clear(self) -> None:
        """Free the cache."""
        self._empty()
        self.capacity = 0

    def _empty(self) -> None:
        self._cache: DynamicCache | None = None
        self._mask: Any = torch.zeros((0, 0), dtype=torch.int64, device=self.store.device)

    def prefill(self, sequences: Sequence[Ids]) -> list[Prefix]:
        """Read whole sequences outside the cache; the prefixes have no padding."""
        width = max(len(tokens) for tokens in sequences)
        ids = np.full((len(sequences), width), self._pad, dtype=np.int64)
        mask = np.zeros((len(sequences), width), dtype=np.int64)
        for row, tokens in enumerate(sequences):
            ids[row, width - len(tokens) :] = tokens
            mask[row, width - len(tokens) :] = 1
        cache, attended = DynamicCache(), torch.from_numpy(mask).to(self.store.device)
        positions = (attended.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._call(torch.from_numpy(ids).to(self.store.device), attended, positions, cache)
        prefixes = []
        for row, tokens in enumerate(sequences):
            start = width - len(tokens)
            past = [(keys[row : row + 1, :, start:], values[row : row + 1, :, start:]) for keys, values in _past(cache)]
            prefixes.append(Prefix(len(tokens), past, logits[row]))
        return prefixes

    def add_rows(self, prefixes: Sequence[Prefix]) -> None:
        """Append a row with each prefix."""
        width = max([self._mask.shape[1], *(prefix.length for prefix in prefixes)])
        mask = [torch.ones((1, prefix.length), dtype=torch.int64, device=self._mask.device) for prefix in prefixes]
        pasts: list[Past] = [prefix.past for prefix in prefixes]
        if self._cache is not None:
            mask, pasts = [self._mask, *mask], [_past(self._cache), *pasts]
        self._mask = torch.cat([functional.pad(part, (width - part.shape[1], 0)) for part in mask])
        layers = []
        for pairs in zip(*pasts, strict=True):  # keys and values of each row, of one layer
            padded = [[functional.pad(part, (0, 0, width - part.shape[2], 0)) for part in pair] for pair in pairs]
            layers.append([torch.cat(parts) for parts in zip(*padded, strict=True)])
        self._fill(layers)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row ``i`` what ``rows[i]`` was; rows beyond are free."""
        if self._cache is None or not rows:
            self._empty()
            return
        chosen = torch.tensor(rows, device=self._mask.device)
        mask = self._mask[chosen]
        padding = int(mask.shape[1] - mask.sum(dim=1).max())
        past = [(keys[chosen, :, padding:], values[chosen, :, padding:]) for keys, values in _past(self._cache)]
        self._mask = mask[:, padding:]
        self._fill(past)

    def step(self, tokens: Any) -> Any:
        """Read the next token of each row, int64 ``[rows]`` on host or device, and return the logits of the token after
        it, ``[rows, vocab]``."""
        tokens = to_device(tokens, self.store.device)
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        positions = self._mask.sum(dim=1, keepdim=True) - 1
        logits = self._call(tokens[:, None], self._mask, positions, self._cache)
        self._account()
        return logits

    def _call(self, ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
        """Return the logits of the last position, ``[rows, vocab]``."""
        options = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self._accepted}
        out = self._model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        return out.logits[:, -1]

    def _fill(self, layers: Iterable[Sequence[Any]]) -> None:
        self._cache = DynamicCache()
        for index, (keys, values) in enumerate(layers):
            self._cache.update(keys, values, index)
        self._account()

    def _account(self) -> None:
        if self._cache is not None:
            tensors = [tensor for pair in _past(self._cache) for tensor in pair]
            self.store.memory.hold(self.store.owner, "kv_cache", tensors)


def _attributes(lm: CausalLM) -> Iterator[tuple[str, list[tuple[Any, str]]]]:
    """Iterate over each weight's name, and the modules and attributes that refer to it: several for a tied weight."""
    holders: dict[int, list[tuple[Any, str]]] = {}
    for module in lm.model.modules():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            holders.setdefault(id(tensor), []).append((module, attribute))
    for name, tensor in lm.named_weights():
        yield name, holders[id(tensor)]


def _past(cache: DynamicCache) -> Past:
    return [(layer.keys, layer.values) for layer in cache.layers]


Step: TypeAlias = Callable[[Any, int], Any]
"""``step(inputs, longest)`` of int64 ``[2, rows]``, each row's token and its position below ``longest``, returns logits
``[rows, vocab]``, and launches the same operations for all inputs of one shape."""

_FEWEST_ROWS = 8
_SHORTEST = 128


def rounded_rows(rows: int, most: int) -> int:
    """Round up to a power of two of at least 8; at most ``most``."""
    return min(most, max(_FEWEST_ROWS, 1 << (rows - 1).bit_length()))


def rounded_length(length: int, most: int) -> int:
    """Round up to a multiple of 128, or beyond 1024 of an eighth of the power of two below; at most ``most``."""
    step = max(_SHORTEST, (1 << length.bit_length()) >> 4)
    return min(most, -(-length // step) * step)


class StepGraphs:
    """Records and replays ``step`` for a cache of ``rows`` rows of ``length`` tokens, whose addresses are recorded."""

    def __init__(self, step: Step, rows: int, length: int, device: Any) -> None:
        self._step, self._rows, self._length = step, rows, length
        self._inputs = torch.zeros((2, rows), dtype=torch.int64, device=device)
        self._logits: Any = None  # shared by all graphs: a step's logits are read before the next step
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._pool: Any = None

    def __call__(self, tokens: Any, positions: Sequence[int]) -> Any:
        """Return logits ``[rows, vocab]`` after ``tokens`` ``[rows]``, valid until the next call."""
        # Graphs are recorded and replayed on the current device, even if the tensors are on another.
        with torch.cuda.device(self._inputs.device) if self._inputs.is_cuda else nullcontext():
            rows = rounded_rows(len(positions), self._rows)
            inputs = torch.zeros((2, rows), dtype=torch.int64, pin_memory=self._inputs.is_cuda)
            inputs[1, : len(positions)] = torch.tensor(positions)
            if not tokens.is_cuda:
                inputs[0, : len(positions)] = tokens
            self._inputs[:, :rows].copy_(inputs, non_blocking=True)
            if tokens.is_cuda:
                self._inputs[0, : len(positions)].copy_(tokens)
            key = rows, rounded_length(max(positions) + 1, self._length)
            if key not in self._replays:
                self._replays[key] = self._record(*key)
            self._replays[key]()
            return self._logits[: len(positions)]

    def _record(self, rows: int, longest: int) -> Callable[[], None]:
        def run() -> None:
            logits = self._step(self._inputs[:, :rows], longest)
            if self._logits is None:
                self._logits = logits.new_empty((self._rows, logits.shape[1]))
            self._logits[:rows].copy_(logits)

        if not self._inputs.is_cuda:
            return run
        # A first run lets libraries allocate their workspaces and choose their kernels.
        current, warmup = torch.cuda.current_stream(self._inputs.device), torch.cuda.Stream(self._inputs.device)
        warmup.wait_stream(current)
        with torch.cuda.stream(warmup):
            run()
        current.wait_stream(warmup)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # Other threads, which write states or send weights, may allocate at the same time.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay
