# SPDX-License-Identifier: Apache-2.0
"""Spoiling files and disks."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_BALLAST = ".ballast"


def flip_bit(file: Path, pick: int) -> int:
    """Flip one bit of a file and return which. Neither its length nor its times give that away."""
    before = file.stat()
    bit = pick % (8 * before.st_size)
    with open(file, "r+b", buffering=0) as opened:
        (byte,) = os.pread(opened.fileno(), 1, bit // 8)
        os.pwrite(opened.fileno(), bytes([byte ^ (1 << bit % 8)]), bit // 8)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return bit


def tear(file: Path, pick: int) -> int:
    """Cut a file short, as a crash in the middle of a write does; returns its new length."""
    length = pick % file.stat().st_size
    os.truncate(file, length)
    return length


def tear_journal(journal: Path) -> int:
    """Leave half a line at a journal's end, as a master does that dies while it appends."""
    half = journal.read_bytes().splitlines()[-1][:40]
    with open(journal, "ab") as file:
        file.write(half)
    return len(half)


def fill_disk(folder: Path) -> Callable[[], None]:
    """Take all the space there is on the disk of ``folder``; returns what gives it back."""
    ballast = folder / _BALLAST
    for size in (1 << 20, 512):
        with open(ballast, "ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(size))
    return lambda: ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """Make ``folder`` a separate disk of this size, in memory. Return True if that was allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={megabytes}m,mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "chaos", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False, timeout=30)
    try:
        yield not mounted.returncode
    finally:
        if not mounted.returncode:
            _unmount(folder)


def clear(folder: Path) -> None:
    """Make ``folder`` an empty one, also where a run that was killed has left a small disk below it."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if Path(line.split()[1]).is_relative_to(folder):
            _unmount(Path(line.split()[1]))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True, timeout=30)
