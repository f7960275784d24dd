# SPDX-License-Identifier: Apache-2.0
"""Host memory that a CUDA device reads and writes by itself, because its pages are locked: at 54 GB/s on an H100, where
copies to and from other memory reach 11 and 7 GB/s.
"""

import mmap
import weakref
from contextlib import suppress
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
        slower, which is logged once."""
        if device.type == "cuda" and not (self.is_locked or self._is_refused):
            address = np.frombuffer(self.mapping, dtype=np.uint8).ctypes.data
            error = _register(address, len(self.mapping), self._flags, device)
            self.is_locked, self._is_refused = not error, bool(error)
            if error:
                _LOG.warning("%d bytes of host memory are copied slowly: %s", len(self.mapping), error)
            else:
                weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, address).atexit = False
        return self.is_locked


def _register(address: int, nbytes: int, flags: int, device: torch.device) -> str:
    """Returns the error, if any."""
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, flags)
        if not int(error):
            return ""
        _forget_error(device)
        return f"cudaHostRegister gives {error}"


def _forget_error(device: torch.device) -> None:
    """CUDA reports an error a second time, with the next kernel."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


class HostBlock:
    """Memory for copies of a device's tensors: ``bytes``, ``uint8 [nbytes]``, zeros at first.

    Page-locked if the device is CUDA, and no larger: torch rounds its own page-locked memory up to a power of two.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.is_locked = False
        if device.type != "cuda":
            self.bytes: Any = torch.zeros(nbytes, dtype=torch.uint8)
            return
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._pages = HostPages(mapping)
        self.is_locked = self._pages.lock(device)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
