# SPDX-License-Identifier: Apache-2.0
"""The bytes of a tensor on an accelerator, copied to the host piece by piece.

::

    main thread      update | DeviceBytes(tensor) | rollout ...
    separate stream           '- after the update: piece -> pinned A, piece -> pinned B, piece -> pinned A, ...
    another thread                                   checksum and write A      B                 A"""

import threading
from collections.abc import Iterator
from typing import Any

import torch

PIECE = 1 << 25  # bytes of each of the two host buffers of a device
_one_reader = threading.Lock()  # workers of one process may share a device, and hence its buffers
_buffers: dict[torch.device, tuple[Any, Any, Any]] = {}
"""Two host buffers, and the stream that fills them if the device is an accelerator, by device."""


class DeviceBytes:
    """The bytes ``flat``, contiguous, which do not change until :meth:`pieces` has ended."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat, self._ready = flat, None
        if flat.device.type == "cuda":
            self._ready = torch.cuda.current_stream(flat.device).record_event()

    def __len__(self) -> int:
        return int(self._flat.numel())

    def pieces(self) -> Iterator[memoryview]:
        """Yield pieces, each valid until the next one is requested."""
        device = self._flat.device
        with _one_reader:
            if device not in _buffers:
                is_cuda = device.type == "cuda"
                one, two = (torch.empty(PIECE, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2))
                _buffers[device] = one, two, torch.cuda.Stream(device) if is_cuda else None
            *buffers, stream = _buffers[device]
            starts = range(0, len(self), PIECE)
            pending = [self._fetch(start, buffer, stream) for start, buffer in zip(starts, buffers, strict=False)]
            for number, start in enumerate(starts):
                piece, copied = pending[number % 2]
                if copied is not None:
                    copied.synchronize()
                yield memoryview(piece.numpy()).cast("B")
                if start + 2 * PIECE < len(self):
                    pending[number % 2] = self._fetch(start + 2 * PIECE, buffers[number % 2], stream)

    def _fetch(self, start: int, buffer: Any, stream: Any) -> tuple[Any, Any]:
        """Start to copy a piece; return its buffer, and the event of its end."""
        source = self._flat[start : start + PIECE]
        target = buffer[: source.numel()]
        if self._ready is None:
            return target.copy_(source), None
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            target.copy_(source, non_blocking=True)
            return target, stream.record_event()


def copy_to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor of a device to a contiguous one of the same dtype in the host's memory."""
    flat, copy = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (source, target))
    at = 0
    for piece in DeviceBytes(flat).pieces():
        copy[at : at + len(piece)] = torch.frombuffer(piece, dtype=torch.uint8)
        at += len(piece)
