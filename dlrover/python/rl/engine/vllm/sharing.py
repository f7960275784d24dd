# SPDX-License-Identifier: Apache-2.0
"""Weights for vLLM's processes on this node: the memory that their sender has written, on the host or the device."""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from dlrover.python.rl.engine.api.weights import Adapters, SnapshotFile, WeightSnapshot, tensor_bytes
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, TensorEntry, Ticket, WeightTable
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport

_ALIGN = 64


@dataclass(frozen=True)
class SharedSnapshot:
    """A snapshot in plain values, whose bytes are with another process of this node: in a file, or on the device."""

    version: int
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    fingerprints: dict[str, int]
    path: str = ""
    starts: dict[str, int] = field(default_factory=dict)
    ticket: dict[str, Any] | None = None  # of the sender, instead of a file
    scale: float = 0.0  # of the adapters, if any
    factors: dict[str, Any] | None = None  # the fields of another one, with the matrices of the adapters
    part: int | None = None  # the part of the tensors to read back; None: all

    def open(self, device: torch.device) -> WeightSnapshot:
        """Map the snapshot's bytes; on a ``device`` they are compared with the sender's fingerprints. While they are in
        use, no sender of weights overwrites them: it has lent the memory, or the file is open with a shared lock."""
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        adapters = None if self.factors is None else Adapters(SharedSnapshot(**self.factors).open(device), self.scale)
        if self.ticket is not None:
            entries = tuple(TensorEntry(name, self.dtypes[name], shape) for name, shape in shapes.items())
            snapshot = _receiver_on(str(device)).receive(Ticket(**{**self.ticket, "table": WeightTable(entries)}))
            return replace(snapshot, version=self.version, adapters=adapters)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            whole = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(whole, os.close, descriptor)
        sizes = {name: tensor_bytes(shapes[name], self.dtypes[name]) for name in self.starts}
        buffers = {name: whole[start : start + sizes[name]] for name, start in self.starts.items()}
        file = SnapshotFile(f"/proc/{os.getpid()}/fd/{descriptor}", self.starts)
        described = self.version, buffers, shapes, self.dtypes, self.fingerprints
        return WeightSnapshot(*described, file=file, adapters=adapters)


@cache
def _receiver_on(device: str) -> CudaIpcTransport:
    """Return the receiver of this process, which keeps the senders' memory open for later versions."""
    return CudaIpcTransport(SyncSettings("vLLM", device=device))


@contextmanager
def share_weights(weights: WeightSnapshot, on_device: bool = False) -> Iterator[SharedSnapshot]:
    """Share a snapshot with other processes inside the block. Bytes in no file are copied to one in memory, unless the
    other processes are ``on_device``, where the bytes are: then these open them there."""
    if weights.adapters is not None:
        parts = weights.adapters.factors, replace(weights, adapters=None)
        with share_weights(parts[0], on_device) as factors, share_weights(parts[1], on_device) as base:
            yield replace(base, version=weights.version, scale=weights.adapters.scale, factors=asdict(factors))
        return
    ticket = weights.ticket if on_device else None
    weights = weights.on_host() if ticket is None else weights
    shapes = {name: list(shape) for name, shape in weights.shapes.items()}
    described = weights.version, shapes, dict(weights.dtypes), dict(weights.fingerprints)
    if ticket is not None:
        plain = {name: getattr(ticket, name) for name in ("id", "version", "sender", "address")}
        yield SharedSnapshot(*described, ticket=plain)
        return
    if weights.file is not None:
        yield SharedSnapshot(*described, weights.file.path, dict(weights.file.starts))
        return
    starts = {}
    with os.fdopen(os.memfd_create("weights"), "wb") as file:
        for name in weights.buffers:
            starts[name] = file.seek(-(-file.tell() // _ALIGN) * _ALIGN)
            file.write(weights.buffers[name].data)
        file.flush()
        yield SharedSnapshot(*described, f"/proc/{os.getpid()}/fd/{file.fileno()}", starts)
