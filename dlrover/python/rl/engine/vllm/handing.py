"""Weights on their way to vLLM's workers, which are processes of their own where there are several."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from dlrover.python.rl.engine.weights import WeightSnapshot

_ALIGN = 64


@dataclass(frozen=True)
class HandedWeights:
    """Where another process of this machine finds the bytes of a snapshot, and everything else of it.

    Attributes:
        path: a file in memory, which ends with the process that made it.
        starts: name to first byte.
        outline: the snapshot without its bytes.
    """

    path: str
    starts: Mapping[str, int]
    outline: WeightSnapshot

    def open(self) -> WeightSnapshot:
        """The snapshot, whose bytes are the file's."""
        whole = np.memmap(self.path, dtype=np.uint8, mode="c")
        told = self.outline
        buffers = {name: whole[start : start + _nbytes(told, name)] for name, start in self.starts.items()}
        return WeightSnapshot(told.version, buffers, told.shapes, told.dtypes, told.fingerprints)


@contextmanager
def handed(weights: WeightSnapshot) -> Iterator[HandedWeights]:
    """Copy the bytes to where other processes can open them, for as long as this lasts."""
    starts = {}
    with os.fdopen(os.memfd_create("weights"), "wb") as file:
        for name in weights.buffers:
            starts[name] = file.seek(-(-file.tell() // _ALIGN) * _ALIGN)
            file.write(weights.tensor(name).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        outline = WeightSnapshot(weights.version, {}, weights.shapes, weights.dtypes, weights.fingerprints)
        yield HandedWeights(f"/proc/{os.getpid()}/fd/{file.fileno()}", starts, outline)


def _nbytes(outline: WeightSnapshot, name: str) -> int:
    return int(np.prod(outline.shapes[name], dtype=np.int64)) * int(getattr(torch, outline.dtypes[name]).itemsize)
