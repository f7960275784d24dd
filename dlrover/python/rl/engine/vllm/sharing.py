# SPDX-License-Identifier: Apache-2.0
"""Weights for vLLM's processes on this node: the pages that their sender has written."""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dlrover.python.rl.engine.api.weights import Adapters, SnapshotFile, WeightSnapshot, tensor_bytes

_ALIGN = 64


@dataclass(frozen=True)
class SharedSnapshot:
    """A snapshot whose bytes are in a file of another process of this node, in plain values."""

    version: int
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    fingerprints: dict[str, int]
    path: str
    starts: dict[str, int]
    scale: float = 0.0  # of the adapters, if any
    factors: dict[str, Any] | None = None  # the fields of another one, with the matrices of the adapters
    part: int | None = None  # the part of the tensors to read back; None: all

    def open(self) -> WeightSnapshot:
        """Map the snapshot's bytes. While they are in use, the file is open with a shared lock, so that no sender of
        weights overwrites it."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            whole = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(whole, os.close, descriptor)
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        sizes = {name: tensor_bytes(shapes[name], self.dtypes[name]) for name in self.starts}
        buffers = {name: whole[start : start + sizes[name]] for name, start in self.starts.items()}
        adapters = None if self.factors is None else Adapters(SharedSnapshot(**self.factors).open(), self.scale)
        file = SnapshotFile(f"/proc/{os.getpid()}/fd/{descriptor}", self.starts)
        described = self.version, buffers, shapes, self.dtypes, self.fingerprints
        return WeightSnapshot(*described, file=file, adapters=adapters)


@contextmanager
def share_weights(weights: WeightSnapshot) -> Iterator[SharedSnapshot]:
    """Share a snapshot with other processes inside the block; bytes in no file are copied to one in memory."""
    if weights.adapters is not None:
        with share_weights(weights.adapters.factors) as factors, share_weights(replace(weights, adapters=None)) as base:
            yield replace(base, version=weights.version, scale=weights.adapters.scale, factors=asdict(factors))
        return
    weights = weights.on_host()
    shapes = {name: list(shape) for name, shape in weights.shapes.items()}
    described = weights.version, shapes, dict(weights.dtypes), dict(weights.fingerprints)
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
