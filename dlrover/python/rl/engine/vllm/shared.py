# SPDX-License-Identifier: Apache-2.0
"""Weights for other processes of this machine: those of vLLM."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from dlrover.python.rl.engine.api.weights import WeightSnapshot, tensor_bytes

_ALIGN = 64


@dataclass(frozen=True)
class SharedWeights:
    """Where another process of this machine finds the bytes of a snapshot, by name, and the snapshot without them."""

    path: str
    starts: Mapping[str, int]
    outline: WeightSnapshot

    def open(self) -> WeightSnapshot:
        """The snapshot, whose bytes are mapped from the file."""
        file, outline = np.memmap(self.path, dtype=np.uint8, mode="c"), self.outline
        sizes = {name: tensor_bytes(outline.shapes[name], outline.dtypes[name]) for name in self.starts}
        buffers = {name: file[start : start + sizes[name]] for name, start in self.starts.items()}
        return replace(outline, buffers=buffers)


@contextmanager
def share_weights(weights: WeightSnapshot) -> Iterator[SharedWeights]:
    """Copy the bytes to a file in memory, which exists inside the block only and ends with this process."""
    starts = {}
    with os.fdopen(os.memfd_create("weights"), "wb") as file:
        for name in weights.buffers:
            starts[name] = file.seek(-(-file.tell() // _ALIGN) * _ALIGN)
            file.write(weights.tensor(name).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        outline = replace(weights, buffers={}, checked=False)
        yield SharedWeights(f"/proc/{os.getpid()}/fd/{file.fileno()}", starts, outline)
