# SPDX-License-Identifier: Apache-2.0
"""Whose fault an exception is, as far as its type and words tell.

A device, driver or link that fails raises an ordinary exception in the process that uses it, and leaves that process
unusable. The words are those of CUDA's error strings, of NCCL's and Gloo's errors, and of torch's rendezvous.
"""

import re
from enum import StrEnum

from dlrover.python.rl.common.errors import DLRoverRLError


class Fault(StrEnum):
    DEVICE = "device"  # of a GPU or its driver
    LINK = "link"  # of a collective, which another process or the network may have broken
    USER = "user"  # of the program
    UNKNOWN = "unknown"


_DEVICE = re.compile(
    r"uncorrectable (ECC|NVLink)|ECC error|hardware stack error|nvlink or a hardware error|\bXid\b|fallen off the bus"
    r"|unspecified launch failure|driver shutting down|driver.{0,40}version mismatch|system not yet initialized"
    r"|CUDA-capable devices? (are|is) (busy|unavailable|detected)"
    r"|^RuntimeError: device check failed|CUDA error: (unknown error|initialization error|context is destroyed)"
    r"|(cudaError|CUDA_ERROR_?)(ECC|Hardware|Launch_?Fail|Unknown|Device_?s?Unavailable|System_?Not|Nvlink|Contained)",
    re.IGNORECASE,
)
_LINK = re.compile(
    r"\bNCCL (error|communicator was aborted)|nccl(System|Internal|Remote|UnhandledCuda)Error"
    r"|Watchdog caught collective operation timeout|timed out after .* waiting for clients|client socket has timed out"
    r"|\bgloo\b.*(timed out|closed|reset|refused|connectFullMesh failed)|Gloo connectFullMesh failed"
    r"|\b(DistBackend|DistNetwork|DistStore|RendezvousTimeout)Error\b",
    re.IGNORECASE,
)
_BUGS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, NameError, TypeError),
    *(NotImplementedError, SyntaxError, SystemExit, ValueError),
    *(FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError),
)


def fault_of(error: BaseException) -> Fault:
    """A ``RuntimeError`` of other words is UNKNOWN, as is every exception of a library's own."""
    fault = fault_in(f"{type(error).__name__}: {error}")
    if fault is not Fault.UNKNOWN and not isinstance(error, _BUGS):
        return fault
    is_told = isinstance(error, DLRoverRLError) or getattr(error, "retryable", False) is True
    return Fault.USER if is_told or isinstance(error, _BUGS) else Fault.UNKNOWN


def fault_in(text: str) -> Fault:
    """DEVICE, LINK or UNKNOWN, by an exception's type and message."""
    if _DEVICE.search(text):
        return Fault.DEVICE
    return Fault.LINK if _LINK.search(text) else Fault.UNKNOWN
