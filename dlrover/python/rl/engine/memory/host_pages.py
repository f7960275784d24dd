# SPDX-License-Identifier: Apache-2.0
"""Host memory that a CUDA device reads and writes by itself, because its pages are locked: several times as fast as
other memory, through which the driver copies.
"""

import mmap
import os
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

_READ_ONLY = 0x08  # cudaHostRegisterReadOnly: CUDA refuses a mapping without write access otherwise


class HostPages:
    """A mapping of memory, whose pages are locked from :meth:`lock` until this object is garbage. It keeps the mapping
    and not the other way round: views of the mapping stay valid."""

    def __init__(self, mapping: mmap.mmap, *, read_only: bool = False) -> None:
        self.mapping, self.is_locked = mapping, False
        self._flags, self._is_refused = _READ_ONLY if read_only else 0, False

    def lock(self, device: torch.device) -> bool:
        """Lock the pages for a device, if that is CUDA; returns True if they are. If the driver refuses, copies are
        slower, which a process logs once."""
        if device.type == "cuda" and not (self.is_locked or self._is_refused):
            address = np.frombuffer(self.mapping, dtype=np.uint8).ctypes.data
            error = _register(address, len(self.mapping), self._flags, device)
            self.is_locked, self._is_refused = not error, bool(error)
            if error:
                _warn(error)
            else:
                weakref.finalize(self, _unregister, os.getpid(), address, device).atexit = False
        return self.is_locked


def _register(address: int, nbytes: int, flags: int, device: torch.device) -> str:
    """Returns the error, if any."""
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, flags)
        if not int(error):
            return ""
        _forget_error(device)
        return f"cudaHostRegister gives {error}"


def _unregister(process: int, address: int, device: torch.device) -> None:
    if process == os.getpid():  # and not forked from it
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                _forget_error(device)


@cache
def _warn(error: str) -> None:
    _LOG.warning("copies between host and device are slow, because memory cannot be locked: %s", error)


def _forget_error(device: torch.device) -> None:
    """CUDA reports an error a second time, with the next kernel."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


class HostBlock:
    """Memory for copies of a device's tensors: ``bytes``, ``uint8 [nbytes]``, zeros at first.

    Page-locked if the device is CUDA, and no larger: torch rounds its own page-locked memory up to a power of two.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.is_for_cuda = device.type == "cuda"
        if not self.is_for_cuda:
            self.bytes: Any = torch.zeros(nbytes, dtype=torch.uint8)
            return
        mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(mmap.MADV_DONTFORK)  # the kernel copies locked pages for a forked process at once
        self._pages = HostPages(mapping)
        self._pages.lock(device)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]
