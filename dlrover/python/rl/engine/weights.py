"""Weights on their way from a train engine to a rollout engine: versioned, fingerprinted, verified."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.common.nearest import hint


@dataclass(frozen=True)
class WeightStamp:
    """Which weights somebody has: two with equal stamps have the same bits under the same names.

    Attributes:
        version: the train engine's version.
        fingerprint: 16 hex digits over the names, dtypes, shapes and CRCs of all tensors.
    """

    version: int
    fingerprint: str

    def __str__(self) -> str:
        return f"version {self.version} ({self.fingerprint})"


@dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """A model's parameters at one version, as contiguous byte buffers (zero-copy through an object store).

    Attributes:
        version: the train engine's version.
        buffers: name to ``uint8`` bytes of the tensor.
        shapes: name to shape.
        dtypes: name to torch dtype name (``"float32"``, ``"bfloat16"``).
        fingerprints: name to CRC-32 of the bytes.
        checked: whether this process has compared the bytes with the fingerprints, and nobody else writes to them. It
            does not travel to other processes.
    """

    version: int
    buffers: Mapping[str, npt.NDArray[np.uint8]]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    fingerprints: Mapping[str, int]
    checked: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightSnapshot, (self.version, self.buffers, self.shapes, self.dtypes, self.fingerprints)

    @property
    def stamp(self) -> WeightStamp:
        """Version and fingerprint of the whole, from the tensors' own fingerprints: no byte is read again."""
        whole = blake2b(digest_size=8)
        for name in sorted(self.fingerprints):
            whole.update(f"{name}|{self.dtypes[name]}|{self.shapes[name]}|{self.fingerprints[name]}\n".encode())
        return WeightStamp(self.version, whole.hexdigest())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def tensor(self, name: str) -> Any:
        """The tensor ``name`` as a view of the received bytes: read it, never write it.

        The bytes may be read-only shared memory. DLPack shares those without a copy and without the warning that
        ``torch.from_numpy`` and ``torch.frombuffer`` give.
        """
        buffer, shape, dtype = self.buffers[name], self.shapes[name], getattr(torch, self.dtypes[name])
        if not buffer.size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_dlpack(buffer).view(dtype).reshape(shape)


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


def verify(snapshot: WeightSnapshot, expected: Mapping[str, tuple[int, ...]], serving: int) -> None:
    """Check a received snapshot against the model that shall take it.

    Args:
        snapshot: what arrived.
        expected: name to shape of the receiving model.
        serving: the version served now; an older one is refused. -1 takes any.

    Raises:
        WeightSyncError: names every missing, unknown, reshaped, cut or corrupted tensor, or the older version.
    """
    told = snapshot.shapes.keys() & snapshot.dtypes.keys() & snapshot.fingerprints.keys()
    faults = [f"'{name}' came without shape, dtype or fingerprint" for name in snapshot.buffers if name not in told]
    arrived = {name: snapshot.shapes[name] for name in snapshot.buffers if name in told}
    faults += misfits(expected, arrived)
    faults += filter(None, (_damage(snapshot, name) for name in arrived if name in expected))
    if snapshot.version < serving:
        faults.append(f"version {snapshot.version} is older than {serving}, which is being served")
    if faults:
        raise WeightSyncError(f"weights of version {snapshot.version} refused: " + "; ".join(faults))


def _damage(snapshot: WeightSnapshot, name: str) -> str:
    buffer, claimed = snapshot.buffers[name], _nbytes(snapshot.shapes[name], snapshot.dtypes[name])
    if buffer.nbytes != claimed:
        return f"'{name}' has {buffer.nbytes} bytes, not the {snapshot.dtypes[name]} it claims"
    if not snapshot.checked and crc32(buffer.data) != snapshot.fingerprints[name]:
        return f"'{name}' does not match its fingerprint"
    return ""


def misfits(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """How the tensors ``found``, name to shape, differ from those of a model; empty when they fit."""
    faults = [f"'{name}' is missing" for name in expected if name not in found]
    for name, shape in found.items():
        if name not in expected:
            faults.append(f"'{name}' is unknown{hint(name, expected)}")
        elif tuple(expected[name]) != tuple(shape):
            faults.append(f"'{name}' has shape {tuple(shape)}, not {tuple(expected[name])}")
    return faults


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)
