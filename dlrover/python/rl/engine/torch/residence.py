"""Where an engine's tensors are: on its device, or in host memory. They move by their storages.

A tensor that moves stays the same object, with its views, ties and wrappers: its storage is emptied on the device, and
filled again when it comes back. So nothing that refers to it has to know.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory
from dlrover.python.rl.engine.memory import DeviceMemory, Kind


@dataclass(eq=False)
class Residence:
    """The tensors of one engine that move together.

    Attributes:
        owner: who they are accounted to.
        memory: the device's accounting.
        on_device: where they are.
    """

    owner: str
    memory: DeviceMemory
    on_device: bool = True
    _tensors: dict[int, "_Moving"] = field(default_factory=dict)

    def hold(self, kind: Kind, tensors: Iterable[Any]) -> None:
        """Account for tensors on the device, and take them along from now on.

        Raises:
            OutOfDeviceMemory: they go beyond the device's capacity.
        """
        fresh = [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]
        fresh = [tensor for tensor in fresh if tensor.untyped_storage()._cdata not in self._tensors]
        self.memory.hold(self.owner, kind, fresh)
        for storage in (tensor.untyped_storage() for tensor in fresh):
            self._tensors[storage._cdata] = _Moving(storage, kind, storage.nbytes())

    def to_host(self) -> None:
        """Copy all to host memory and free the device's.

        Where that breaks off, what has moved is told to be away and comes back with :meth:`to_device`.

        Raises:
            EngineError: the memory of one is shared with a numpy array, and can never be freed; nothing has moved.
        """
        if fixed := sum(not moving.storage.resizable() for moving in self._tensors.values()):
            raise EngineError(
                f"{fixed} tensors of {self.owner} cannot be moved: somebody asked them for their numpy(), which shares"
                " their memory for good; take a copy of a tensor first"
            )
        self.on_device = False
        for moving in self._tensors.values():
            moving.leave()
        if self.memory.device != "cpu" and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def to_device(self) -> None:
        """Bring all back.

        Raises:
            OutOfDeviceMemory: they do not fit; all of them are in host memory then.
        """
        away: dict[Kind, list[_Moving]] = {}
        for moving in self._tensors.values():
            if moving.host is not None:
                away.setdefault(moving.kind, []).append(moving)
        try:
            with self.memory.computing(self.owner):
                self._bring(away)
        except OutOfDeviceMemory:
            self.to_host()
            raise
        self.on_device = True

    def _bring(self, away: Mapping[Kind, Sequence["_Moving"]]) -> None:
        for kind, several in away.items():
            self.memory.require(self.owner, kind, sum(moving.nbytes for moving in several))
            for moving in several:
                moving.enter()
            self.memory.hold(self.owner, kind, [moving.bytes() for moving in several])

    def release(self) -> None:
        """Free the memory of all, on the device and on the host, whoever still refers to them."""
        for moving in self._tensors.values():
            moving.host = None
            if moving.storage.resizable():  # else a numpy array shares it
                moving.storage.resize_(0)
        self._tensors.clear()

    def there(self, tensor: Any) -> Any:
        """``tensor``, or a view of its copy in host memory while it is there."""
        moving = self._tensors.get(tensor.untyped_storage()._cdata)
        if moving is None or moving.host is None:
            return tensor.detach()
        whole = moving.host.view(tensor.dtype)
        return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(eq=False)
class _Moving:
    """One storage; ``host``: its bytes in host memory, None while it is on the device."""

    storage: Any
    kind: Kind
    nbytes: int
    host: Any = None

    def bytes(self) -> Any:
        """The storage as bytes ``[nbytes]``."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def leave(self) -> None:
        """To the host."""
        if self.host is None:
            host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.storage.device.type == "cuda")
            self.host = host.copy_(self.bytes())
        if self.storage.nbytes():
            self.storage.resize_(0)

    def enter(self) -> None:
        """To the device."""
        self.storage.resize_(self.nbytes)
        self.bytes().copy_(self.host)
        self.host = None
