# SPDX-License-Identifier: Apache-2.0
"""Offload: tensors that move between a device and page-locked host memory, and the state of an engine whose tensors
another library moves.

A tensor that moves stays the same object, with its views, ties and wrappers: its storage is emptied on the device.
"""

import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.engine.api.weights import DeviceKind, Part
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory, Kind

_LOG = get_logger(__name__)

_READ_ONLY = 0x08  # cudaHostRegisterReadOnly: CUDA refuses a mapping without write access otherwise


class HostPages:
    """A mapping of memory whose pages are locked from :meth:`lock` until this object is garbage. Views of the mapping
    stay valid after that."""

    def __init__(self, mapping: mmap.mmap, *, read_only: bool = False) -> None:
        self.mapping, self.is_locked = mapping, False
        self._flags, self._is_refused = _READ_ONLY if read_only else 0, False

    def lock(self, device: torch.device) -> bool:
        """Lock the pages for a CUDA device; returns True if they are locked. If the driver refuses, copies are slower,
        which is logged once per process."""
        if device.type == "cuda" and not (self.is_locked or self._is_refused):
            address = np.frombuffer(self.mapping, dtype=np.uint8).ctypes.data
            with torch.cuda.device(device):
                error = torch.cuda.cudart().cudaHostRegister(address, len(self.mapping), self._flags)
            self.is_locked, self._is_refused = not int(error), bool(int(error))
            if self._is_refused:
                _forget_error(device)
                _warn(f"cudaHostRegister gives {error}")
            else:
                weakref.finalize(self, _unregister, os.getpid(), address, device).atexit = False
        return self.is_locked


def _unregister(process: int, address: int, device: torch.device) -> None:
    if process == os.getpid():  # not in a forked process
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                _forget_error(device)


@cache
def _warn(error: str) -> None:
    _LOG.warning("copies between host and device are slow, because memory cannot be locked: %s", error)


def _forget_error(device: torch.device) -> None:
    """Consume an error, which CUDA reports again with the next kernel."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


class HostBlock:
    """Memory for copies of a device's tensors: ``bytes``, ``uint8 [nbytes]``, zeros at first. It is page-locked if the
    device is CUDA, and no larger: torch rounds its own page-locked memory up to a power of two."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.is_for_cuda = device.type == "cuda"
        if not self.is_for_cuda:
            self.bytes: Any = torch.zeros(nbytes, dtype=torch.uint8)
            return
        mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(mmap.MADV_DONTFORK)  # the kernel copies locked pages for a forked process at once
        self._pages = HostPages(mapping)
        self._pages.lock(device)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]


_KINDS: dict[Part, tuple[Kind, ...]] = {
    "all": ("weights", "kv_cache"),
    "weights": ("weights",),
    "kv_cache": ("kv_cache",),
}


class OffloadState:
    """The places of a rollout engine's weights and key-value cache, if another library holds the tensors. A meta tensor
    of each size stands in for them: it is accounted for, and has no storage."""

    def __init__(self, memory: DeviceMemory, name: str) -> None:
        self.place: DeviceKind = "meta"  # of the weights
        self.unready_reason = ""  # why the weights cannot be used; empty if they can
        self._memory, self._owner = memory, memory.owner(name)
        self._nbytes: dict[Kind, int] = {}
        self._present: dict[Kind, Any] = {}

    def missing_kinds(self, part: Part) -> list[Kind]:
        return [kind for kind in _KINDS[part] if kind not in self._present]

    def bring(self, kind: Kind, nbytes: int | None = None) -> None:
        """Account for ``kind`` before it is brought; ``nbytes`` None: as many as before."""
        self._nbytes[kind] = self._nbytes[kind] if nbytes is None else nbytes
        stand_in = torch.empty(self._nbytes[kind], dtype=torch.uint8, device="meta")
        self._memory.hold(self._owner, kind, [stand_in])
        self._present[kind] = stand_in
        if kind == "weights":
            self.place = "cuda"

    def drop(self, kind: Kind, place: DeviceKind) -> None:
        """Undo :meth:`bring`; the weights are in ``place``."""
        self._present.pop(kind, None)
        self.place = place

    def computing(self) -> AbstractContextManager[None]:
        return self._memory.computing(self._owner)

    def leave(self, place: DeviceKind) -> None:
        self._present.clear()
        self.place = place

    def footprint(self) -> dict[str, int]:
        return {kind: self._nbytes[kind] for kind in self._present if self._nbytes[kind]}


def divide_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes of each of ``ranks`` devices that share ``nbytes``, rounded up."""
    return -(-nbytes // ranks)


def raise_unless_ready(place: DeviceKind, unready_reason: str, has_cache: bool) -> None:
    """Raise an ``EngineError`` unless weights and cache are on the device; names the call that brings them."""
    if place != "cuda":
        state = "in host memory" if place == "cpu" else "released"
        raise EngineError(f"the weights are {state}: cuda('weights') brings them to the device")
    if unready_reason:
        raise EngineError(unready_reason)
    if not has_cache:
        raise EngineError("there is no key-value cache: cuda('kv_cache') brings it back")


RELEASED = "the weights have been released: receive new ones"
BROKEN_OFF = "receiving weights failed midway: receive them again"


class SleepingEngine(ABC):
    """Implements ``Offloadable`` for a rollout engine with an :class:`OffloadState`."""

    version: int
    _offload: OffloadState

    @abstractmethod
    def _sleep(self, place: DeviceKind) -> None:
        """Free the device; the weights go to ``place``."""

    @abstractmethod
    def _wake(self, kind: Kind) -> None:
        """Bring ``kind`` to the device."""

    def cpu(self) -> None:
        if self._offload.unready_reason:
            self.meta()
        elif self.footprint():
            self._sleep("cpu")

    def meta(self) -> None:
        self._sleep("meta")
        self.version, self._offload.unready_reason = -1, RELEASED

    def cuda(self, part: Part = "all") -> None:
        for kind in self._offload.missing_kinds(part):
            self._wake(kind)

    def place(self) -> DeviceKind:
        return self._offload.place

    def footprint(self) -> dict[str, int]:
        """Bytes by kind, on the device of each rank."""
        return self._offload.footprint()

    def _check_ready(self) -> None:
        has_cache = not self._offload.missing_kinds("kv_cache")
        raise_unless_ready(self._offload.place, self._offload.unready_reason, has_cache)


@dataclass(eq=False)
class ParkedTensors:
    """The tensors of one engine that move together, accounted to ``owner``."""

    owner: str
    memory: DeviceMemory
    on_device: bool = True
    _storages: dict[int, "_MovableStorage"] = field(default_factory=dict)

    def hold(self, kind: Kind, tensors: Iterable[Any]) -> None:
        """Account for tensors on the device, and move them with the others from now on."""
        new = [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]
        new = [tensor for tensor in new if tensor.untyped_storage()._cdata not in self._storages]
        self.memory.hold(self.owner, kind, new)
        for storage in (tensor.untyped_storage() for tensor in new):
            self._storages[storage._cdata] = _MovableStorage(storage, kind, storage.nbytes())

    def to_host(self) -> None:
        """Copy all to host memory and free the device's. After a failure :meth:`to_device` brings moved tensors back.
        Raises an ``EngineError`` before it moves any if one shares its memory with a numpy array and cannot be freed.
        """
        if fixed := sum(not each.storage.resizable() for each in self._storages.values()):
            raise EngineError(
                f"{fixed} tensors of {self.owner} cannot be moved, because numpy() was called on them: copy a tensor"
                " before calling numpy()"
            )
        self.on_device = False
        for each in self._storages.values():
            if each.host is None:
                each.block = each.block or HostBlock(each.nbytes, each.storage.device)
                each.host = each.block.bytes.copy_(each.bytes())
            if each.storage.nbytes():
                each.storage.resize_(0)
        self.memory.release_cache()

    def to_device(self) -> None:
        """Bring all back; if they do not fit (``OutOfDeviceMemory``), all of them stay in host memory."""
        try:
            with self.memory.computing(self.owner):
                self._bring()
        except OutOfDeviceMemory:
            self.to_host()
            raise
        self.on_device = True

    def _bring(self) -> None:
        absent: dict[Kind, list[_MovableStorage]] = {}
        for each in self._storages.values():
            if each.host is not None:
                absent.setdefault(each.kind, []).append(each)
        for kind, storages in absent.items():
            self.memory.require(self.owner, kind, sum(each.nbytes for each in storages))
            for each in storages:
                each.storage.resize_(each.nbytes)
                each.bytes().copy_(each.host)
                each.host = None
                if each.block is not None and not each.block.is_for_cuda:
                    each.block = None
            self.memory.hold(self.owner, kind, [each.bytes() for each in storages])

    def release(self) -> None:
        """Free the memory of all on device and host, even if tensors still refer to it."""
        for each in self._storages.values():
            each.host = each.block = None
            if each.storage.resizable():  # else a numpy array shares it
                each.storage.resize_(0)
        self._storages.clear()

    def locate(self, tensor: Any) -> Any:
        """Return ``tensor``, or while it is offloaded a view of its copy in host memory, valid until the next move."""
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None or storage.host is None:
            return tensor.detach()
        whole = storage.host.view(tensor.dtype)
        return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(eq=False)
class _MovableStorage:
    storage: Any
    kind: Kind
    nbytes: int
    host: Any = None  # its bytes while it is offloaded
    block: HostBlock | None = None  # their memory, reused for a CUDA device: locking takes longer than copying

    def bytes(self) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
