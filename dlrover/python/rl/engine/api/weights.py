# SPDX-License-Identifier: Apache-2.0
"""Weights in transfer between engines: versioned, fingerprinted, verified; and engines that can be offloaded."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from isal.isal_zlib import crc32

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.common.names import hint

DeviceKind: TypeAlias = Literal["cpu", "cuda", "meta"]
"""The place of an engine's tensors: the host, its device (the host stands in for a missing one), or none."""

Part: TypeAlias = Literal["all", "weights", "kv_cache"]
"""The tensors that :meth:`Offloadable.cuda` brings back."""


class Offloadable(Protocol):
    """An engine that can give its device memory to another one and take it back. Results do not depend on it, except
    for rounding where adapters are added to received weights.

    A call that needs absent tensors raises an ``EngineError`` that names the call that brings them back."""

    def cpu(self) -> None:
        """Move everything to host memory; a key-value cache is dropped."""

    def cuda(self, part: Part = "all") -> None:
        """Bring ``part`` to the device; train engines refuse ``kv_cache``. Raises ``OutOfDeviceMemory``."""

    def meta(self) -> None:
        """Release all tensors on host and device. Only new weights bring the engine back."""

    def place(self) -> DeviceKind:
        """Return the place of the weights."""

    def footprint(self) -> dict[str, int]:
        """Return the bytes on the device by kind: ``weights``, ``gradients``, ``optimizer``, ``kv_cache``; no 0s."""


@dataclass(frozen=True)
class WeightStamp:
    """Identifies weights: equal stamps mean the same bits under the same names. With adapters they mean the same bits
    of both; the sums may differ by rounding between kinds of devices."""

    version: int  #: the train engine's
    fingerprint: str  #: 16 hex digits over the names, dtypes, shapes and CRCs of all tensors

    def __str__(self) -> str:
        return f"version {self.version} ({self.fingerprint})"


@dataclass(frozen=True)
class SnapshotFile:
    """An open file with the bytes of a snapshot, for other processes of this node."""

    path: str  # /proc/PID/fd/NUMBER
    starts: Mapping[str, int]  # of each tensor's bytes


@dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """A model's parameters at one version, as contiguous byte buffers (zero-copy through an object store).

    :meth:`tensor` returns a parameter with its adapter, if any; ``buffers`` and ``file`` have it without."""

    version: int  #: the train engine's
    buffers: Mapping[str, Any]  #: bytes of each tensor, ``uint8``: numpy arrays, or tensors on a device
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]  #: torch's names: "float32", "bfloat16"
    fingerprints: Mapping[str, int]  #: CRC-32 of the bytes; on a device as its transport computes them
    checked: bool = False
    """This process has compared the bytes with the fingerprints, and nothing else writes to them. Not pickled."""

    file: SnapshotFile | None = None
    """Open as long as the buffers are in use. Not pickled."""

    adapters: "Adapters | None" = None
    """Adapters to add to the tensors in ``buffers``."""

    ticket: Any = None  #: with which other processes open bytes in a sender's memory on a device; not pickled

    lock_pages: Callable[[torch.device], bool] | None = None
    """Locks the memory of all bytes for the device that will read them, if possible. Not pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        host = self.on_host()
        bare = host.version, host.buffers, host.shapes, host.dtypes, host.fingerprints
        return WeightSnapshot, (*bare, False, None, host.adapters)

    @property
    def stamp(self) -> WeightStamp:
        """The stamp by the tensors' fingerprints: no buffer is read."""
        whole = blake2b(digest_size=8)
        for name in sorted(self.fingerprints):
            whole.update(f"{name}|{self.dtypes[name]}|{self.shapes[name]}|{self.fingerprints[name]}\n".encode())
        stamp = WeightStamp(self.version, whole.hexdigest())
        if self.adapters is None:
            return stamp
        return adapted_stamp(stamp, self.adapters.factors.stamp, self.adapters.scale)

    @property
    def nbytes(self) -> int:
        added = 0 if self.adapters is None else self.adapters.factors.nbytes
        return added + sum(int(buffer.nbytes) for buffer in self.buffers.values())

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Any:
        """Return a view of the received bytes: never write to it. An adapter is added on ``device``, to a copy."""
        base = self.bare_tensor(name)
        if self.adapters is None or name + DOWN not in self.adapters.factors.buffers:
            return base
        down, up = (self.adapters.factors.tensor(name + end) for end in (DOWN, UP))
        return add_adapter(base, down, up, self.adapters.scale, device, base.dtype)

    def on_host(self) -> "WeightSnapshot":
        """Return the snapshot with all bytes in host memory, for other processes."""
        if all(isinstance(buffer, np.ndarray) for buffer in self.buffers.values()):
            return self
        host = take_snapshot(((name, self.bare_tensor(name)) for name in self.buffers), self.version)
        return replace(host, adapters=self.adapters)

    def merged(self) -> "WeightSnapshot":
        """Return the weights with their adapters added."""
        if self.adapters is None:
            return self
        return take_snapshot(((name, self.tensor(name)) for name in self.buffers), self.version)

    def bare_tensor(self, name: str) -> Any:
        """Return a tensor without its adapter."""
        buffer, shape, dtype = self.buffers[name], self.shapes[name], getattr(torch, self.dtypes[name])
        if not isinstance(buffer, np.ndarray):
            return buffer.view(dtype).view(shape)
        if not buffer.size:
            return torch.empty(shape, dtype=dtype)
        # The bytes may be read-only shared memory, about which torch.from_numpy and torch.frombuffer warn.
        return torch.from_dlpack(buffer).view(dtype).reshape(shape)


DOWN, UP = ".lora_A", ".lora_B"
"""Suffixes of an adapter's matrices, after the name of their weight."""

_BLOCK = 1 << 24
"""Elements that are computed at a time."""


def add_adapter(base: Any, down: Any, up: Any, scale: float, device: torch.device | str, dtype: Any) -> Any:
    """Compute a new tensor ``W + scale B A`` (Hu et al., arXiv:2106.09685, equation 3) on ``device`` in float32, cast
    to ``dtype``."""
    down, up = (factor.to(device, torch.float32) for factor in (down, up))
    merged = torch.empty(base.shape, dtype=dtype, device=device)
    rows = max(1, _BLOCK // base.shape[1])
    for whole, part, outputs in zip(merged.split(rows), base.split(rows), up.split(rows), strict=True):
        whole.copy_(torch.addmm(part.to(device).float(), outputs, down, alpha=scale))
    return merged


@dataclass(frozen=True, eq=False)
class Adapters:
    """The low-rank matrices of a version, under the names of their weights with ``DOWN`` and ``UP``."""

    factors: WeightSnapshot
    scale: float


def adapted_stamp(base: WeightStamp, factors: WeightStamp, scale: float) -> WeightStamp:
    """Return the stamp of weights with adapters added."""
    both = f"{base.fingerprint}|{factors.fingerprint}|{scale!r}"
    return WeightStamp(factors.version, blake2b(both.encode(), digest_size=8).hexdigest())


def take_snapshot(named: Iterable[tuple[str, Any]], version: int) -> WeightSnapshot:
    """Copy named tensors to host memory and fingerprint them."""
    buffers, shapes, dtypes = {}, {}, {}
    for name, tensor in named:
        host = tensor.detach().to("cpu", copy=True).contiguous()
        shapes[name] = tuple(host.shape)
        dtypes[name] = str(host.dtype).removeprefix("torch.")
        buffers[name] = host.reshape(-1).view(torch.uint8).numpy()
    fingerprints = {name: crc32(buffer.data) for name, buffer in buffers.items()}
    return WeightSnapshot(version, buffers, shapes, dtypes, fingerprints)


def verify_snapshot(snapshot: WeightSnapshot, expected: Mapping[str, tuple[int, ...]], serving: int) -> None:
    """Compare a received snapshot with the shapes of the model that will adopt it, and with the version served now.
    Raises a WeightSyncError that names every missing, unknown, reshaped, truncated or corrupted tensor, and an older
    version."""
    described = snapshot.shapes.keys() & snapshot.dtypes.keys() & snapshot.fingerprints.keys()
    faults = [f"'{name}' has no shape, dtype or fingerprint" for name in snapshot.buffers if name not in described]
    arrived = {name: snapshot.shapes[name] for name in snapshot.buffers if name in described}
    faults += describe_shape_mismatches(expected, arrived)
    faults += filter(None, (_find_damage(snapshot, name) for name in arrived if name in expected))
    if snapshot.adapters is not None:
        factors = snapshot.adapters.factors
        for name in {name.removesuffix(DOWN).removesuffix(UP): None for name in factors.buffers}:
            base, down, up = snapshot.shapes.get(name), factors.shapes.get(name + DOWN), factors.shapes.get(name + UP)
            if not (base and down and up) or (*up[:1], *down[1:]) != base or up[1:] != down[:1]:
                faults.append(f"the adapter of '{name}' has shapes {up} and {down}, which do not give {base}")
        faults += filter(None, (_find_damage(factors, name) for name in factors.buffers))
    if snapshot.version < serving:
        faults.append(f"version {snapshot.version} is older than {serving}, which is served now")
    if faults:
        raise WeightSyncError(f"weights of version {snapshot.version} refused: " + "; ".join(faults))


def _find_damage(snapshot: WeightSnapshot, name: str) -> str:
    buffer, claimed = snapshot.buffers[name], tensor_bytes(snapshot.shapes[name], snapshot.dtypes[name])
    if buffer.nbytes != claimed:
        return f"'{name}' has {buffer.nbytes} bytes, not the {snapshot.dtypes[name]} it claims"
    if not snapshot.checked and crc32(buffer.data) != snapshot.fingerprints[name]:
        return f"'{name}' does not match its fingerprint"
    return ""


def describe_shape_mismatches(
    expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """List the differences between a model's shapes and received ones; empty if they match."""
    faults = [f"'{name}' is missing" for name in expected if name not in actual]
    for name, shape in actual.items():
        if name not in expected:
            faults.append(f"'{name}' is unknown{hint(name, expected)}")
        elif tuple(expected[name]) != tuple(shape):
            faults.append(f"'{name}' has shape {tuple(shape)}, not {tuple(expected[name])}")
    return faults


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)
