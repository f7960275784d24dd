# SPDX-License-Identifier: Apache-2.0
"""Weights in vLLM's workers: read by vLLM's own loader, and read back."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.vllm.sharing import SharedSnapshot

READ_BACK_PARTS = 8


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing is agreed upon before the first update."""


class SnapshotReceiver(WeightTransferEngine[NoInit, Any]):
    """Receives snapshots in each of vLLM's workers. vLLM keeps one for each, and calls it while it has no requests, or
    they are paused. An error leaves a mixture of weights, which vLLM cannot repair: it has to be restarted."""

    init_info_cls = NoInit
    update_info_cls = SharedSnapshot
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInit) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedSnapshot) -> None:
        self._snapshot, self._part = update_info.open(self.device), update_info.part
        self.model.load_weights(_iterate(self._snapshot, self.device))

    def finish_weight_update(self) -> None:
        """Compare the model's tensors with the snapshot, bit for bit: all tensors, or one part of them. Tensors that
        were not read or not written are always found. Raises WeightSyncError with all differences.

        vLLM's own loader decides which part of a tensor belongs where: it runs again, with comparisons for copies."""
        finalize_layerwise_reload(self.model, self.model_config)
        reads_all = self.parallel_config.pipeline_parallel_size == 1
        comparison = _CopyComparison(dict(self.model.named_parameters()), self._part, reads_all)
        with comparison:
            self.model.load_weights(comparison.watch(_iterate(self._snapshot, self.device, self._part)))
        del self._snapshot
        if faults := comparison.faults():
            raise WeightSyncError("; ".join(faults))

    def shutdown(self) -> None: ...


class _CopyComparison(TorchDispatchMode):
    """Compares, while active, instead of copying into one of ``parameters``, which stays as it is."""

    def __init__(self, parameters: Mapping[str, Any], part: int | None, reads_all: bool) -> None:
        super().__init__()
        self._part, self._is_compared, self._reads_all = part, True, reads_all
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
        unread = self._unread if self._reads_all else set()
        return [
            *(f"'{name}' has other values" for name in sorted(self._different)),
            *(f"vLLM does not read '{name}'" for name in sorted(unread)),
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


def _owner_of(owners: Mapping[int, str], tensor: Any) -> str | None:
    return owners.get(tensor.untyped_storage().data_ptr())


def _iterate(snapshot: WeightSnapshot, device: torch.device, part: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield all tensors; with a number, tensors of other parts come without their adapters, which takes no time."""
    for number, name in enumerate(snapshot.buffers):
        is_whole = part in (None, number % READ_BACK_PARTS)
        yield name, snapshot.tensor(name, device) if is_whole else snapshot.bare_tensor(name)
