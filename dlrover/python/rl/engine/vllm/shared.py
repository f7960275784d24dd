# SPDX-License-Identifier: Apache-2.0
"""Weights for other processes of this machine: those of vLLM."""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from dlrover.python.rl.engine.api.weights import SnapshotFile, WeightSnapshot, tensor_bytes

_ALIGN = 64


@dataclass(frozen=True)
class SharedWeights:
    """A snapshot without its bytes, and the file of another process of this machine that has them."""

    outline: WeightSnapshot
    file: SnapshotFile
    factors: "SharedWeights | None" = None  # of the adapters that belong to them

    def open(self) -> WeightSnapshot:
        """The snapshot, whose bytes are mapped from the file. While they are in use, the file is open with a shared
        lock, so that a sender of weights does not overwrite it."""
        descriptor = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            whole = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(whole, os.close, descriptor)
        starts, outline = self.file.starts, self.outline
        sizes = {name: tensor_bytes(outline.shapes[name], outline.dtypes[name]) for name in starts}
        buffers = {name: whole[start : start + sizes[name]] for name, start in starts.items()}
        adapters = outline.adapters
        if adapters is not None and self.factors is not None:
            adapters = replace(adapters, factors=self.factors.open())
        file = SnapshotFile(f"/proc/{os.getpid()}/fd/{descriptor}", starts)
        return replace(outline, buffers=buffers, adapters=adapters, file=file)


@contextmanager
def share_weights(weights: WeightSnapshot) -> Iterator[SharedWeights]:
    """The snapshot for other processes, inside the block. Bytes that are in no file are copied to one in memory, which
    ends with this process."""
    weights = weights.on_host()
    outline = replace(weights, buffers={}, checked=False, file=None, lock_pages=None)
    if weights.adapters is not None:
        with share_weights(weights.adapters.factors) as factors, share_weights(replace(weights, adapters=None)) as base:
            adapters = replace(weights.adapters, factors=factors.outline)
            yield SharedWeights(replace(outline, adapters=adapters), base.file, factors)
        return
    if weights.file is not None:
        yield SharedWeights(outline, weights.file)
        return
    starts = {}
    with os.fdopen(os.memfd_create("weights"), "wb") as file:
        for name in weights.buffers:
            starts[name] = file.seek(-(-file.tell() // _ALIGN) * _ALIGN)
            file.write(weights.buffers[name].data)
        file.flush()
        yield SharedWeights(outline, SnapshotFile(f"/proc/{os.getpid()}/fd/{file.fileno()}", starts))
