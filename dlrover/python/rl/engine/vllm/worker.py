# SPDX-License-Identifier: Apache-2.0
"""Token sampling and weights inside vLLM's workers.

vLLM's own seeds depend on a request's history: after an interruption it would generate other tokens. This logits
processor instead samples each token with the random number of its position, writes the log-prob in place of the logit,
and masks all other tokens. vLLM samples greedily from processed logits: it picks the token and reports the log-prob.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams as VllmSamplingParams
from vllm.device_allocator import get_mem_allocator_instance
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from dlrover.python.rl.engine.api.base import SamplingParams
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.rollout.sampling import choose, sampling_key
from dlrover.python.rl.engine.vllm.child import SharedWeights

READ_BACK_PARTS = 8

EXTRA = "dlrover_drawing"
"""Key of the :class:`SamplingPlan` in a request's ``extra_args``."""


@dataclass(frozen=True, eq=False)
class SamplingPlan:
    sampling: SamplingParams
    uniform: list[float]  # random numbers of the remaining tokens
    known_ids: int | None = None  # this id and higher ones are not sampled


class PositionSampler(LogitsProcessor):
    """Samples every token; vLLM creates one in each worker."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, tuple[SamplingPlan, list[int]]] = {}  # plan, and vLLM's growing list of generated tokens
        self._groups: list[tuple[SamplingParams, list[int]]] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow changes of vLLM's batch, a ``BatchUpdate`` or None."""

        def row_of(
            params: VllmSamplingParams, prompt: list[int] | None, output: list[int]
        ) -> tuple[SamplingPlan, list[int]] | None:
            plan = (params.extra_args or {}).get(EXTRA)
            return None if plan is None else (plan, output)

        if not process_dict_updates(self._rows, batch_update, row_of):
            return
        groups: dict[tuple[Any, ...], tuple[SamplingParams, list[int]]] = {}
        for number, (plan, _) in self._rows.items():
            groups.setdefault(sampling_key(plan.sampling), (plan.sampling, []))[1].append(number)
        self._groups = list(groups.values())

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample a token for each row of ``logits`` ``[rows, vocab]``, and leave only its log-prob there."""
        for sampling, rows in self._groups:
            index = torch.tensor(rows, device=self._device)
            plans = [self._rows[row] for row in rows]
            # vLLM discards tokens past the last one, which get its number.
            numbers = [plan.uniform[min(len(output), len(plan.uniform) - 1)] for plan, output in plans]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=self._device)
            known_ids = plans[0][0].known_ids  # equal in all plans of an engine
            tokens, logprobs = choose(logits[index, :known_ids], sampling, uniform)
            logits[index] = -torch.inf
            logits[index, tokens] = logprobs.to(logits.dtype)
        return logits


_dispatch = layers.dispatch_cpu_unquantized_gemm


def _dispatch_unpacked(layer: Any, remove_weight: bool) -> None:
    """Let a linear layer on a CPU compute with its own weight instead of vLLM's packed copy: a reload does not update
    the copy of a tied head, and no copy can be read back."""
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        _dispatch(layer, remove_weight)


if current_platform.is_cpu():
    layers.dispatch_cpu_unquantized_gemm = _dispatch_unpacked


class WeightLoader:
    """Extends vLLM's worker, which adds this class to its bases."""

    model_runner: Any
    _sleep_saved_buffers: dict[str, Any]

    def take_weights(self, weights: WeightSnapshot | SharedWeights) -> None:
        tensors = _iterate(weights, self.model_runner.device)
        self.model_runner.reload_weights(weights_iterator=tensors, is_checkpoint_format=True)

    def read_back(self, weights: WeightSnapshot | SharedWeights, part: int | None = None) -> list[str]:
        """Compare the model's tensors with ``weights``, bit for bit, and return the differences: of all tensors, or of
        one ``part`` of ``READ_BACK_PARTS``. Tensors that were not read or not written are always found.

        vLLM's own loader decides which part of a tensor belongs where: it runs again, with comparisons for copies.
        """
        comparison = _CopyComparison(dict(self.model_runner.model.named_parameters()), part)
        with comparison:
            self.model_runner.model.load_weights(comparison.watch(_iterate(weights, self.model_runner.device, part)))
        return comparison.faults()

    def drop_layer_records(self) -> None:
        """Drop vLLM's records for reloading layers, which would keep the layers alive after the engine ends."""
        for layer in self.model_runner.model.modules():
            LAYERWISE_INFO.pop(layer, None)

    def drop_host_copies(self) -> None:
        """Drop the host copies of sleeping weights, except for buffers, which no loader restores."""
        copies = {}
        for start, block in get_mem_allocator_instance().pointer_to_data.items():
            if block.tag == "weights" and block.cpu_backup_tensor is not None:
                copies[start], block.cpu_backup_tensor = block.cpu_backup_tensor, None
        buffers = dict(self.model_runner.model.named_buffers())
        self._sleep_saved_buffers |= read_copies(buffers, copies)  # written back when the weights wake
        copies.clear()
        self.release_host_memory()

    def release_host_memory(self) -> None:
        """Return the page-locked memory that PyTorch caches, in powers of two."""
        torch.accelerator.empty_host_cache()

    def cache_bytes(self) -> int:
        caches = self.model_runner.kv_caches
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches}
        return sum(storages.values())


class _CopyComparison(TorchDispatchMode):
    """Compares, while active, instead of copying into one of ``parameters``, which stays as it is."""

    def __init__(self, parameters: Mapping[str, Any], part: int | None) -> None:
        super().__init__()
        self._part, self._is_compared = part, True
        self._owners = {tensor.untyped_storage().data_ptr(): name for name, tensor in parameters.items()}
        self._untouched = {name for name, tensor in parameters.items() if _owner_of(self._owners, tensor) == name}
        self._name = ""
        self._unread: set[str] = set()
        self._different: set[str] = set()

    def watch(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield ``named``, and record which tensors vLLM reads."""
        for number, (name, tensor) in enumerate(named):
            self._name = name
            self._is_compared = self._part in (None, number % READ_BACK_PARTS)
            self._unread.add(name)
            yield name, tensor

    def faults(self) -> list[str]:
        return [
            *(f"'{name}' has other values" for name in sorted(self._different)),
            *(f"vLLM does not read '{name}'" for name in sorted(self._unread)),
            *(f"vLLM's '{name}' is never written" for name in sorted(self._untouched)),
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (owner := _owner_of(self._owners, args[0])) is not None:
            target, source = args[:2]
            if self._is_compared:
                expected = source.to(target.device, target.dtype).expand_as(target).reshape(-1).view(torch.uint8)
                if not torch.equal(target.reshape(-1).view(torch.uint8), expected):
                    self._different.add(self._name)
            self._unread.discard(self._name)
            self._untouched.discard(owner)
            return target
        return func(*args, **(kwargs or {}))


def read_copies(tensors: Mapping[str, Any], copies: Mapping[int, Any]) -> dict[str, Any]:
    """Restore the values of contiguous tensors whose memory is freed from copies of that memory, by start address."""
    restored = {}
    for name, tensor in tensors.items():
        for start, copy in copies.items():
            offset = tensor.data_ptr() - start
            if 0 <= offset < copy.numel():
                values = copy[offset : offset + tensor.nbytes].clone().view(tensor.dtype)
                restored[name] = values.view(tensor.shape)
    return restored


def _owner_of(owners: Mapping[int, str], tensor: Any) -> str | None:
    return owners.get(tensor.untyped_storage().data_ptr())


def _iterate(
    weights: WeightSnapshot | SharedWeights, device: torch.device, part: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield all tensors; with a number, tensors of other parts come without their adapters, which takes no time."""
    snapshot = weights.open() if isinstance(weights, SharedWeights) else weights
    for number, name in enumerate(snapshot.buffers):
        is_whole = part in (None, number % READ_BACK_PARTS)
        yield name, snapshot.tensor(name, device) if is_whole else snapshot.bare_tensor(name)
