"""What is asked of each of vLLM's workers beside its own calls; vLLM mixes this class into its worker's."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.device_allocator import get_mem_allocator_instance
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.platforms import current_platform

from dlrover.python.rl.engine.vllm.handing import HandedWeights
from dlrover.python.rl.engine.weights import WeightSnapshot

_dispatch = layers.dispatch_cpu_unquantized_gemm


def _dispatch_unpacked(layer: Any, remove_weight: bool) -> None:
    """Let a linear layer of a CPU compute with its own weight.

    vLLM would pack a copy and drop the weight. The copy of a head that is tied to the embeddings is then not renewed
    with them when weights are loaded again, and no copy can be read back.
    """
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        _dispatch(layer, remove_weight)


if current_platform.is_cpu():
    layers.dispatch_cpu_unquantized_gemm = _dispatch_unpacked


class WeightTaker:
    """Takes weights in, reads them back, and tells how much memory the cache has."""

    model_runner: Any
    _sleep_saved_buffers: dict[str, Any]

    def take_weights(self, weights: WeightSnapshot | HandedWeights) -> None:
        """Load weights in place.

        Args:
            weights: themselves, or where they are.
        """
        self.model_runner.reload_weights(weights_iterator=_named(weights), is_checkpoint_format=True)

    def read_back(self, weights: WeightSnapshot | HandedWeights) -> list[str]:
        """How the model's tensors differ from ``weights``, bit for bit; empty when it has exactly these.

        vLLM's own loader says which part of which tensor belongs where; it runs once more, and each of its copies is
        compared instead of made.
        """
        comparing = _Comparing(dict(self.model_runner.model.named_parameters()))
        with comparing:
            self.model_runner.model.load_weights(comparing.watched(_named(weights)))
        return comparing.faults()

    def forget_layers(self) -> None:
        """Drop what vLLM notes to load a layer again, which keeps the layer alive for ever: before the engine ends."""
        for layer in self.model_runner.model.modules():
            LAYERWISE_INFO.pop(layer, None)

    def forget_copies(self) -> None:
        """Drop the host's copies of weights that sleep. The buffers among them stay: no loader brings them back."""
        blocks = {
            start: block for start, block in get_mem_allocator_instance().pointer_to_data.items() if _is_copied(block)
        }
        buffers = dict(self.model_runner.model.named_buffers())
        copies = {start: block.cpu_backup_tensor for start, block in blocks.items()}
        self._sleep_saved_buffers |= read_copies(buffers, copies)  # vLLM writes these back when it wakes the weights
        for block in blocks.values():
            block.cpu_backup_tensor = None

    def cache_bytes(self) -> int:
        """Bytes of the key-value cache."""
        storages = {storage.data_ptr(): storage.nbytes() for storage in map(_storage, self.model_runner.kv_caches)}
        return sum(storages.values())


class _Comparing(TorchDispatchMode):
    """While it is on, a copy into one of ``parameters`` compares and leaves the parameter as it is."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__()
        self._owners = {_storage(tensor).data_ptr(): name for name, tensor in parameters.items()}
        self._untouched = {name for name, tensor in parameters.items() if _owner_of(self._owners, tensor) == name}
        self._name = ""
        self._unread: set[str] = set()
        self._different: set[str] = set()

    def watched(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """``named``, while it is noted which of them are read."""
        for name, tensor in named:
            self._name = name
            self._unread.add(name)
            yield name, tensor

    def faults(self) -> list[str]:
        """What was found."""
        return [
            *(f"'{name}' has other values" for name in sorted(self._different)),
            *(f"'{name}' is read by nothing" for name in sorted(self._unread)),
            *(f"vLLM's '{name}' is written by nothing" for name in sorted(self._untouched)),
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (owner := _owner_of(self._owners, args[0])) is not None:
            held = args[0]
            if not torch.equal(_bits(held), _bits(args[1].to(held.device, held.dtype).expand_as(held))):
                self._different.add(self._name)
            self._unread.discard(self._name)
            self._untouched.discard(owner)
            return held
        return func(*args, **(kwargs or {}))


def read_copies(tensors: Mapping[str, Any], copies: Mapping[int, Any]) -> dict[str, Any]:
    """The values of tensors whose memory is gone, from copies of it.

    Args:
        tensors: contiguous ones; only their addresses are looked at.
        copies: bytes that were copied, by the address that they began at.

    Returns:
        On the host, those whose memory was copied.
    """
    found = {}
    for name, tensor in tensors.items():
        for start, copy in copies.items():
            offset = tensor.data_ptr() - start
            if 0 <= offset < copy.numel():
                values = copy[offset : offset + tensor.nbytes].clone().view(tensor.dtype)
                found[name] = values.view(tensor.shape)
    return found


def _is_copied(block: Any) -> bool:
    return block.tag == "weights" and block.cpu_backup_tensor is not None


def _storage(tensor: Any) -> Any:
    return tensor.untyped_storage()


def _bits(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8)


def _owner_of(owners: Mapping[int, str], tensor: Any) -> str | None:
    return owners.get(_storage(tensor).data_ptr())


def _named(weights: WeightSnapshot | HandedWeights) -> Iterator[tuple[str, Any]]:
    here = weights.open() if isinstance(weights, HandedWeights) else weights
    yield from ((name, here.tensor(name)) for name in here.buffers)
