"""The forward pass of any causal language model that keeps keys and values: the library's own."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import DynamicCache

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.torch.decoder import Ids, Prefix
from dlrover.python.rl.engine.torch.loading import CausalLM
from dlrover.python.rl.engine.torch.outline import cache_bytes_per_token
from dlrover.python.rl.engine.torch.store import WeightStore

Past = list[tuple[Any, Any]]
"""Keys and values of each layer, ``[rows, kv_heads, seq, head_dim]`` each."""


class HuggingFaceDecoder:
    """Implements :class:`~dlrover.python.rl.engine.torch.decoder.Decoder` with the model itself.

    Rows are padded on the left to the longest, so all grow at the same end. The cache grows by copies: slower than
    :class:`~dlrover.python.rl.engine.torch.fused.FusedDecoder`, and right for whatever mask or position a model uses.

    Args:
        lm: the model; it becomes the decoder's own, its weights move to a store.
        dtype: of weights and cache.
        memory: of the device.
        owner: who weights and cache are accounted to.
        share: of the device, that they may fill together.

    Raises:
        EngineError: the model keeps its past in something else than keys and values.
    """

    def __init__(self, lm: CausalLM, dtype: Any, memory: DeviceMemory, owner: str, share: float) -> None:
        model = lm.model
        if getattr(model, "_is_stateful", False):
            raise EngineError(
                f"a model of type '{model.config.model_type}' keeps a state, not keys and values: it cannot be batched"
            )
        self.capacity = 0
        self._pad, self._memory, self._owner, self._share = lm.pad_id, memory, owner, share
        self._token_bytes = cache_bytes_per_token(lm, dtype)
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions, self._cuts = "position_ids" in accepted, "logits_to_keep" in accepted
        self._places = dict(_places(lm))
        self.store = WeightStore([[pair] for pair in lm.named_weights()], dtype, memory, owner)
        self._model = model
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(memory.device)
        self.clear()
        self.bind()

    # -- the decoder's port -------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Compute with the weights where they are now."""
        there = self.store.views if self.store.place == "cuda" else {}
        for name, places in self._places.items():
            tensor = there.get(name)
            if tensor is None:
                tensor = torch.empty(self.store.shapes[name], device="meta")
            for module, attribute in places:
                if attribute in module._parameters:
                    module._parameters[attribute] = torch.nn.Parameter(tensor, requires_grad=False)
                else:
                    module._buffers[attribute] = tensor

    def fit(self, rows: int, length: int) -> int:
        """Nothing to make: the cache grows as it is filled, by copies, so that it is there twice at times."""
        self.clear()
        self.capacity = length
        room = self._memory.room(self._share)
        return rows if room is None else max(1, min(rows, room // (2 * length * self._token_bytes)))

    def clear(self) -> None:
        """Release the cache."""
        self._cache: DynamicCache | None = None
        self._mask: Any = torch.zeros((0, 0), dtype=torch.int64, device=self._memory.device)
        self.capacity = 0

    def prefill(self, sequences: Sequence[Ids]) -> list[Prefix]:
        """Read whole sequences, padded on the left and masked there."""
        width = max(len(tokens) for tokens in sequences)
        ids = np.full((len(sequences), width), self._pad, dtype=np.int64)
        mask = np.zeros((len(sequences), width), dtype=np.int64)
        for row, tokens in enumerate(sequences):
            ids[row, width - len(tokens) :] = tokens
            mask[row, width - len(tokens) :] = 1
        cache, seen = DynamicCache(), torch.from_numpy(mask).to(self._memory.device)
        positions = (seen.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._call(torch.from_numpy(ids).to(self._memory.device), seen, positions, cache)
        whole = _past(cache)
        return [
            Prefix(len(tokens), _cut(whole, row, width - len(tokens)), logits[row])
            for row, tokens in enumerate(sequences)
        ]

    def seat(self, prefixes: Sequence[Prefix]) -> None:
        """Add a row with each, in order."""
        width = max([self._mask.shape[1], *(prefix.length for prefix in prefixes)])
        mask = [torch.ones((1, prefix.length), dtype=torch.int64, device=self._mask.device) for prefix in prefixes]
        pasts: list[Past] = [prefix.past for prefix in prefixes]
        if self._cache is not None:
            mask, pasts = [self._mask, *mask], [_past(self._cache), *pasts]
        self._mask = torch.cat([functional.pad(part, (width - part.shape[1], 0)) for part in mask])
        self._cache = DynamicCache()
        for index, parts in enumerate(zip(*pasts, strict=True)):
            keys, values = ([_widen(pair[kind], width) for pair in parts] for kind in (0, 1))
            self._cache.update(torch.cat(keys), torch.cat(values), index)
        self._account()

    def keep(self, rows: Sequence[int]) -> None:
        """Row ``i`` becomes what ``rows[i]`` was; padding that no row needs is cut off."""
        if self._cache is None or not rows:
            capacity = self.capacity
            self.clear()
            self.capacity = capacity
            return
        chosen = torch.tensor(rows, device=self._mask.device)
        mask = self._mask[chosen]
        padding = int(mask.shape[1] - mask.sum(dim=1).max())
        past = [(keys[chosen, :, padding:], values[chosen, :, padding:]) for keys, values in _past(self._cache)]
        self._mask, self._cache = mask[:, padding:], DynamicCache()
        for index, (keys, values) in enumerate(past):
            self._cache.update(keys, values, index)
        self._account()

    def step(self, tokens: Any) -> Any:
        """Read a token more in each row: int64 ``[rows]`` to the logits of the next, ``[rows, vocab]``."""
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        positions = self._mask.sum(dim=1, keepdim=True) - 1
        logits = self._call(tokens[:, None], self._mask, positions, self._cache)
        self._account()
        return logits

    # -- the model ----------------------------------------------------------------------------------------------------

    def _call(self, ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
        """Logits of the last position: ``[rows, vocab]``."""
        more: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        if self._cuts:
            more["logits_to_keep"] = 1
        out = self._model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **more)
        return out.logits[:, -1]

    def _account(self) -> None:
        if self._cache is not None:
            tensors = [tensor for pair in _past(self._cache) for tensor in pair]
            self._memory.hold(self._owner, "kv_cache", tensors)


def _places(lm: CausalLM) -> Iterator[tuple[str, list[tuple[Any, str]]]]:
    """Each weight's name and where the model keeps it: the modules' own attributes, several for a tied one."""
    at: dict[int, list[tuple[Any, str]]] = {}
    for module in lm.model.modules():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            at.setdefault(id(tensor), []).append((module, attribute))
    for name, tensor in lm.named_weights():
        yield name, at[id(tensor)]


def _past(cache: DynamicCache) -> Past:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _cut(past: Past, row: int, start: int) -> Past:
    return [(keys[row : row + 1, :, start:], values[row : row + 1, :, start:]) for keys, values in past]


def _widen(entries: Any, width: int) -> Any:
    """Pad on the left to ``width`` tokens."""
    return functional.pad(entries, (0, 0, width - entries.shape[2], 0))
