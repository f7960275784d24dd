"""Who holds how much of a device: the accounting that offload, leases and out-of-memory messages rest on.

On a machine without an accelerator the host stands in for one: what is brought "to the device" is copied to storage
of its own and accounted for, so that offload can be tested, with a capacity, anywhere.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dlrover.python.rl.common.errors import OutOfDeviceMemory
from dlrover.python.rl.engine.holdings import HoldingsBoard, phrase

Kind: TypeAlias = Literal["weights", "gradients", "optimizer", "kv_cache", "buffer"]


@dataclass
class DeviceMemory:
    """The tensors that engines of this process have on one device.

    A tensor counts with its whole storage, once, from when it is brought or told until nothing refers to it any more
    or its storage is emptied (``resize_(0)``).

    Attributes:
        device: a torch device; ``"cpu"`` stands in for one.
        capacity: bytes, or None for the device's own limit.
        peak: most bytes that were held at a time, as seen whenever something was brought, told or asked.
        board: where this process tells the others of its node what it holds, and learns what they do.
    """

    device: str = "cpu"
    capacity: int | None = None
    peak: int = 0
    board: HoldingsBoard | None = field(default=None, repr=False)
    _held: dict[int, "_Holding"] = field(default_factory=dict, repr=False)
    _owners: dict[str, int] = field(default_factory=dict, repr=False)

    def owner(self, name: str) -> str:
        """A name for one more owner: ``name``, or ``"name 2"`` where there is one of this name already."""
        self._owners[name] = self._owners.get(name, 0) + 1
        return name if self._owners[name] == 1 else f"{name} {self._owners[name]}"

    def allocate(self, owner: str, kind: Kind, shape: Sequence[int], dtype: Any) -> Any:
        """Zeros on the device, accounted to ``owner``.

        Raises:
            OutOfDeviceMemory: there is no room; names who holds what.
        """
        wanted = math.prod(shape) * int(dtype.itemsize)
        self.require(owner, kind, wanted)
        try:
            made = torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise self._refusal(owner, kind, wanted) from error
        self.hold(owner, kind, [made])
        return made

    def room(self, share: float = 1.0) -> int | None:
        """Bytes that can still be had within ``share`` of the device; None where there is no limit.

        What the allocator of this process keeps unused can be had, too.
        """
        limits = [] if self.capacity is None else [int(self.capacity * share) - self.total()]
        if torch.device(self.device).type == "cuda":
            free, whole = torch.cuda.mem_get_info(self.device)
            kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            limits.append(free + kept - int(whole * (1.0 - share)))
        return min(limits) if limits else None

    def release_cache(self) -> None:
        """Give what the allocator keeps for later back to the device, for other processes; nothing on a CPU."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def bring(self, owner: str, kind: Kind, tensor: Any) -> Any:
        """A copy of ``tensor`` on the device, accounted to ``owner``.

        Raises:
            OutOfDeviceMemory: there is no room; names who holds what.
        """
        wanted = tensor.numel() * tensor.element_size()
        self.require(owner, kind, wanted)
        try:
            there = tensor.detach().to(self.device, copy=True)
        except torch.OutOfMemoryError as error:
            raise self._refusal(owner, kind, wanted) from error
        self.hold(owner, kind, [there])
        return there

    def hold(self, owner: str, kind: Kind, tensors: Iterable[Any]) -> None:
        """Account for tensors that are on the device already.

        Raises:
            OutOfDeviceMemory: they go beyond ``capacity``.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._held.get(storage._cdata)
            if known is None or not known.nbytes:
                self.require(owner, kind, storage.nbytes())
                self._held[storage._cdata] = _Holding(StorageWeakRef(storage), owner, kind)
        self.peak = max(self.peak, self.total())
        self.publish()

    def publish(self) -> None:
        """Tell the other processes what is held now; holding does, letting go does not."""
        if self.board is not None:
            self.board.publish(self.by_owner())

    def total(self) -> int:
        """Bytes that are held."""
        return sum(holding.nbytes for holding in self._live().values())

    def held(self, owner: str) -> dict[str, int]:
        """Bytes of ``owner`` by kind."""
        return self.by_owner().get(owner, {})

    def by_owner(self) -> dict[str, dict[str, int]]:
        """Bytes by owner and kind."""
        totals: dict[str, dict[str, int]] = {}
        for holding in self._live().values():
            kinds = totals.setdefault(holding.owner, {})
            kinds[holding.kind] = kinds.get(holding.kind, 0) + holding.nbytes
        return totals

    def _live(self) -> dict[int, "_Holding"]:
        self._held = {key: holding for key, holding in self._held.items() if holding.nbytes}
        return self._held

    def require(self, owner: str, kind: Kind, wanted: int) -> None:
        """Refuse what goes beyond ``capacity``; the device's own limit shows when it is asked.

        Raises:
            OutOfDeviceMemory: ``wanted`` bytes more do; names who holds what.
        """
        if self.capacity is not None and self.total() + wanted > self.capacity:
            raise self._refusal(owner, kind, wanted)

    @contextmanager
    def computing(self, owner: str) -> Iterator[None]:
        """Say who holds what where there is no room for what is computed inside.

        Raises:
            OutOfDeviceMemory: instead of PyTorch's own error, or of another program's that says so in words.
        """
        try:
            yield
        except OutOfDeviceMemory:
            raise
        except Exception as error:
            if not _says_no_room(error):
                raise
            raise OutOfDeviceMemory(f"{owner} has no room to compute on {self.device}, and {self._told()}") from error

    def _refusal(self, owner: str, kind: Kind, wanted: int) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(f"{owner} asks for {wanted:,} bytes of {kind} on {self.device}, and {self._told()}")

    def _told(self) -> str:
        room = "" if self.capacity is None else f" of {self.capacity:,}"
        others = {} if self.board is None else self.board.others()
        told = "".join(f"; process {each.pid} last told of {phrase(each.held)}" for each in others.values())
        return f"{self.total():,}{room} are held ({phrase(self.by_owner()) or 'by nobody here'}{told})"


def _says_no_room(error: BaseException | None) -> bool:
    """Whether it, or what it came of, is an accelerator's refusal."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__
    return False


@dataclass(frozen=True)
class _Holding:
    storage: StorageWeakRef
    owner: str
    kind: Kind

    @property
    def nbytes(self) -> int:
        """0 when nothing refers to it any more."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return 0 if storage is None else int(storage.nbytes())
