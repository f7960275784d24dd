# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors on their way to host memory."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlrover.python.rl.engine.memory.host_pages import HostPages
from dlrover.python.rl.engine.weight_sync.base import Pieces

Bytes = npt.NDArray[np.uint8]

_UNDER_WAY = 1 << 27
"""Bytes that a device is copying while those before them are fingerprinted."""

_streams: dict[torch.device, Any] = {}


def copy_to_host(target: Bytes, piece: Any) -> None:
    """Copy a ``uint8`` tensor of any device to host memory of the same length."""
    if piece.device.type == "cpu":
        # A fifth faster than torch's copy at the size of a bucket; numpy() would keep an engine's tensor from moving.
        np.copyto(target, np.from_dlpack(piece))
    else:
        torch.from_numpy(target).copy_(piece)


def stream_to_host(target: Bytes, pages: HostPages, pieces: Pieces) -> Iterator[int]:
    """Copy pieces, offset and bytes (``uint8``) in order, to host memory, which ``pages`` have. Those of a CUDA device
    come while the caller reads the ones before.

    Yields:
        Up to where the bytes are there.
    """
    under_way: deque[tuple[int, Any, Any]] = deque()  # where a piece ends, the piece, and its arrival
    arrived = 0
    try:
        for offset, piece in pieces:
            stop = offset + len(piece)
            if piece.device.type != "cuda" or not pages.lock(piece.device):
                _await_all(under_way)
                copy_to_host(target[offset:stop], piece)
                yield stop
                continue
            under_way.append((stop, piece, _begin_copy(target[offset:stop], piece)))
            if under_way[0][2].query() or stop - arrived > _UNDER_WAY:
                arrived = _take_arrived(under_way)
                yield arrived
        while under_way:
            yield _take_arrived(under_way)
    finally:
        _await_all(under_way)  # the device would write into memory that is free again


def _begin_copy(target: Bytes, piece: Any) -> Any:
    """Copy a piece on a stream of its own; returns the event of its end."""
    if piece.device not in _streams:
        _streams[piece.device] = torch.cuda.Stream(piece.device)
    stream = _streams[piece.device]
    stream.wait_stream(torch.cuda.current_stream(piece.device))
    with torch.cuda.stream(stream):
        torch.from_numpy(target).copy_(piece, non_blocking=True)
        return stream.record_event()


def _await_all(under_way: deque[tuple[int, Any, Any]]) -> None:
    while under_way:
        under_way[0][2].synchronize()
        under_way.popleft()


def _take_arrived(under_way: deque[tuple[int, Any, Any]]) -> int:
    """Wait for the first piece and take all that have arrived; returns where they end."""
    under_way[0][2].synchronize()
    stop = 0
    while under_way and under_way[0][2].query():
        stop, _, _ = under_way.popleft()
    return stop


class HostBuffer:
    """Gives the host access to buckets: to themselves, or to a copy in page-locked memory that is reused."""

    def __init__(self) -> None:
        self._copy: Any = torch.empty(0, dtype=torch.uint8)

    def read(self, part: Any) -> Bytes:
        """The bytes of a ``uint8`` tensor, valid until the next call."""
        on_host = part
        if part.device.type != "cpu":
            if len(self._copy) < len(part):
                self._copy = torch.empty(len(part), dtype=torch.uint8, pin_memory=True)
            on_host = self._copy[: len(part)].copy_(part)
        data: Bytes = on_host.numpy()
        return data
