# SPDX-License-Identifier: Apache-2.0
"""Accounting of device memory by owner, for offload, device locks and out-of-memory messages.

On a node without an accelerator the CPU stands in for one: tensors brought "to the device" are copied to separate
storage and accounted for, so offload can be tested anywhere.
"""

import fcntl
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dlrover.python.rl.common.errors import OutOfDeviceMemory

OwnerBytes: TypeAlias = Mapping[str, Mapping[str, int]]
"""Bytes by owner and kind."""

_SUFFIX = ".memory"


class MemoryLedger:
    """The bytes of each process of a node on a device, a file for each. For messages, never for decisions.

    The kernel's lock on a file shows that its process lives. ``name`` is the stem of this process's file."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self.name = uuid.uuid4().hex
        self._path = self._folder / f"{self.name}{_SUFFIX}"
        self._descriptor: int | None = None
        self._length = 0

    def publish(self, owners: OwnerBytes) -> None:
        if self._descriptor is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # readers lock no empty file
        record = json.dumps({"pid": os.getpid(), "owners": owners}).encode().ljust(self._length)
        self._length = len(record)  # a shorter record has to cover a longer one
        os.pwrite(self._descriptor, record, 0)

    def others(self) -> dict[str, tuple[int, OwnerBytes]]:
        """Return the other processes' last records by name: pid and bytes. Files of dead processes are removed."""
        records: dict[str, tuple[int, OwnerBytes]] = {}
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path == self._path:
                continue
            with suppress(OSError, ValueError, KeyError):  # being removed or written
                if not path.stat().st_size:
                    continue
                record = read_living(path)
                if record is None:
                    path.unlink()
                elif record["owners"]:
                    records[path.stem] = record["pid"], record["owners"]
        return records

    def close(self) -> None:
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def read_living(path: Path) -> dict[str, Any] | None:
    """Read a file that a living process has locked; None if that process is dead."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            record: dict[str, Any] = json.loads(file.read() or "{}")
            return record
    return None


def format_owner_bytes(owners: OwnerBytes) -> str:
    """Format as ``actor: 40 of weights + 80 of optimizer``; empty if there are no owners."""
    return ", ".join(
        f"{owner}: " + " + ".join(f"{size:,} of {kind}" for kind, size in kinds.items())
        for owner, kinds in owners.items()
    )


Kind: TypeAlias = Literal["weights", "gradients", "optimizer", "kv_cache", "buffer"]


@dataclass
class DeviceMemory:
    """The tensors of this process's engines on one device. A tensor counts with its whole storage, once, until it is
    garbage or its storage is emptied (``resize_(0)``)."""

    device: str = "cpu"  # a torch device; "cpu" stands in for one
    capacity: int | None = None  # bytes; None: the device's own limit
    peak: int = 0  # most bytes at a time, sampled at every call of hold()
    ledger: MemoryLedger | None = field(default=None, repr=False)  # shows the bytes to other processes
    _storages: dict[int, tuple[StorageWeakRef, str, Kind]] = field(default_factory=dict, repr=False)
    _owners: dict[str, int] = field(default_factory=dict, repr=False)

    def owner(self, name: str) -> str:
        """Register an owner; returns ``name``, or ``"name 2"`` if that exists already."""
        self._owners[name] = self._owners.get(name, 0) + 1
        return name if self._owners[name] == 1 else f"{name} {self._owners[name]}"

    def allocate(self, owner: str, kind: Kind, shape: Sequence[int], dtype: Any) -> Any:
        """Make zeros on the device, accounted to ``owner``."""
        nbytes = math.prod(shape) * int(dtype.itemsize)
        return self._place(owner, kind, nbytes, lambda: torch.zeros(tuple(shape), dtype=dtype, device=self.device))

    def bring(self, owner: str, kind: Kind, tensor: Any) -> Any:
        return self._place(owner, kind, tensor.nbytes, lambda: tensor.detach().to(self.device, copy=True))

    def _place(self, owner: str, kind: Kind, nbytes: int, make: Callable[[], Any]) -> Any:
        self.require(owner, kind, nbytes)
        try:
            tensor = make()
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(owner, kind, nbytes) from error
        self.hold(owner, kind, [tensor])
        return tensor

    def free_bytes(self, share: float = 1.0) -> int | None:
        """Return the bytes left within ``share`` of the device, including the allocator's cache; None: no limit."""
        limits = [] if self.capacity is None else [int(self.capacity * share) - self.total()]
        if torch.device(self.device).type == "cuda":
            free, whole = torch.cuda.mem_get_info(self.device)
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            limits.append(free + cached - int(whole * (1.0 - share)))
        return min(limits) if limits else None

    def release_cache(self) -> None:
        """Return the allocator's cache to the device, for other processes; nothing on a CPU."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def hold(self, owner: str, kind: Kind, tensors: Iterable[Any]) -> None:
        """Account for tensors that are on the device already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            tracked = self._storages.get(storage._cdata)
            if tracked is None or not _count_bytes(tracked[0]):
                self.require(owner, kind, storage.nbytes())
                self._storages[storage._cdata] = StorageWeakRef(storage), owner, kind
        self.peak = max(self.peak, self.total())
        if self.ledger is not None:  # freeing memory does not update it
            with suppress(OSError):  # only messages need it
                self.ledger.publish(self.by_owner())

    def release(self, tensor: Any) -> None:
        """Stop accounting for a tensor that its last user is about to free."""
        self._storages.pop(tensor.untyped_storage()._cdata, None)

    def total(self) -> int:
        return sum(nbytes for kinds in self.by_owner().values() for nbytes in kinds.values())

    def bytes_of(self, owner: str) -> dict[str, int]:
        return self.by_owner().get(owner, {})

    def by_owner(self) -> dict[str, dict[str, int]]:
        owners: dict[str, dict[str, int]] = {}
        for key, (storage, owner, kind) in list(self._storages.items()):
            if nbytes := _count_bytes(storage):
                kinds = owners.setdefault(owner, {})
                kinds[kind] = kinds.get(kind, 0) + nbytes
            else:
                del self._storages[key]
        return owners

    def require(self, owner: str, kind: Kind, nbytes: int) -> None:
        """Raise ``OutOfDeviceMemory``, which lists the bytes of every owner, if ``nbytes`` more exceed ``capacity``."""
        if self.capacity is not None and self.total() + nbytes > self.capacity:
            raise self._out_of_memory(owner, kind, nbytes)

    @contextmanager
    def computing(self, owner: str) -> Iterator[None]:
        """Add the bytes of all owners to an out-of-memory error, PyTorch's or another library's."""
        try:
            yield
        except OutOfDeviceMemory:
            raise
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            usage = self._format_usage()
            raise OutOfDeviceMemory(f"{owner} ran out of memory while computing on {self.device}: {usage}") from error

    def _out_of_memory(self, owner: str, kind: Kind, nbytes: int) -> OutOfDeviceMemory:
        usage = self._format_usage()
        return OutOfDeviceMemory(f"{owner} asks for {nbytes:,} bytes of {kind} on {self.device}: {usage}")

    def _format_usage(self) -> str:
        capacity = "" if self.capacity is None else f" of {self.capacity:,}"
        records = {} if self.ledger is None else self.ledger.others()
        reports = "".join(f"; process {pid} reports {format_owner_bytes(owners)}" for pid, owners in records.values())
        own = format_owner_bytes(self.by_owner()) or "none by this process"
        return f"{self.total():,}{capacity} bytes are in use ({own}{reports})"


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__
    return False


def _count_bytes(reference: StorageWeakRef) -> int:
    """Count the bytes of a storage, 0 once it is garbage."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else int(storage.nbytes())
