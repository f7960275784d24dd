# SPDX-License-Identifier: Apache-2.0
"""What a disk does to a writer: cutting files off, and what a power cut would find."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def small_disk(folder, inodes=0):
    """A disk of 2 MB at ``folder``, with so few ``inodes`` or any number; None where file systems cannot be mounted."""
    folder.mkdir()
    options = f"size=2m,nr_inodes={inodes}" if inodes else "size=2m"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def largest_file(nbytes):
    """Let the kernel cut every file of this process off at ``nbytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def system_calls(*names):
    """Which of these functions of ``os`` are called: what a power cut would find is a matter of their order."""
    called, wanted = [], {getattr(os, name): name for name in names}
    sys.setprofile(lambda frame, event, function: event == "c_call" and called.append(wanted.get(function)))
    try:
        yield called
    finally:
        sys.setprofile(None)
        called[:] = [name for name in called if name]
