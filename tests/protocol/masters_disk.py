# SPDX-License-Identifier: Apache-2.0
"""The disk of a journal. It may be full, falter, and lose at a power cut what was not synced; the process that uses it
may be killed at any operation. It stands for the module ``os`` in the journal's module, on real files."""

import errno
import os
from dataclasses import dataclass, field
from random import Random

SECTOR = 512  # bytes that a disk writes whole or not at all
SHARE = 0.7  # of the operations fail while it falters
TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


class Killed(BaseException):
    """The process is killed at this point."""


@dataclass
class File:
    """The safe content of a file, and the writes since: ``(offset, data)``, or ``(size, None)`` for a cut."""

    safe: bytes = b""
    writes: list[tuple[int, bytes | None]] = field(default_factory=list)
    is_new: bool = False  # its first content is in the system's memory only

    def sync(self):
        for offset, data in self.writes:
            self.safe = written(self.safe, offset, data)
        self.writes = []

    def content_after_power_cut(self, rng):
        """Keep of each write since the last sync everything, a part, or nothing."""
        content = self.safe
        for offset, data in self.writes:
            length = rng.choice((0, len(data or b""), part_of(rng, len(self.safe), offset, data or b"")))
            if (data is None and rng.random() < 0.5) or (data and length):
                content = written(content, offset, data and data[:length])
        return content


def part_of(rng, size, offset, data):
    """Return how much of an interrupted write is there: any part of what extends a file, whole sectors of the rest."""
    if offset + len(data) > size:
        return rng.randint(0, len(data))
    return rng.choice((0, *range(-offset % SECTOR, len(data), SECTOR), len(data)))


def written(content, offset, data):
    start = content[:offset].ljust(offset, b"\0")
    return start if data is None else start + data + content[offset + len(data) :]


class Disk:
    """``room``: bytes by which files may still grow; ``kill_in``: operations until its user is killed; ``failing``: the
    calls that fail now and then, or each time, and the number of their error. None: it does not happen."""

    def __init__(self, folder, rng: Random, kill) -> None:
        self.folder, self.rng, self.kill = folder, rng, kill
        self.room: int | None = None
        self.kill_in: int | None = None
        self.failing: tuple[tuple[str, ...], int, float] | None = None
        self._files: dict[int, File] = {}  # by inode
        self._unsafe_names: set[str] = set()
        self._stale: set[int] = set()  # handles

    def __getattr__(self, name):
        return getattr(os, name)

    def heal(self):
        self.room = self.kill_in = self.failing = None

    def falter(self, number):
        self.failing = ("open", "pread", "pwrite", "fsync"), number, SHARE

    def power_fails(self):
        for path in sorted(self.folder.glob("journal*.jsonl")):
            if path.name in self._unsafe_names and self.rng.random() < 0.5:
                path.unlink()
                continue
            with open(path, "r+b") as file:
                entry = self._file(file.fileno())
                entry.safe, entry.writes = entry.content_after_power_cut(self.rng), []
                file.truncate()
                file.write(entry.safe)
        self._unsafe_names.clear()

    def patched(self):
        """Return the names of the journal's module that lead here."""
        return {"os": self, "open": self.open_new, "sync_folder": self.sync_folder}

    # -- calls of the journal's module ---------------------------------------------------------------------------------

    def sync_folder(self, folder):
        self._operation()
        self._unsafe_names.clear()

    def open_new(self, path, mode):
        """Create a file, also to be read."""
        self._operation()
        file = open(path, mode.replace("x", "x+"))  # noqa: SIM115 -- its user closes it
        self._files[os.fstat(file.fileno()).st_ino] = File(is_new=True)
        self._stale.discard(file.fileno())
        return file

    def open(self, path, flags):
        self._falter("open")
        handle = os.open(path, flags)
        self._stale.discard(handle)
        self._file(handle)
        return handle

    def link(self, source, target):
        self._operation()
        os.link(source, target)
        self._unsafe_names.add(target.name)

    def pread(self, handle, size, offset):
        self._falter("pread", handle)
        return os.pread(handle, size, offset)

    def fsync(self, handle):
        file = self._file(handle)
        try:
            self._falter("fsync", handle)
        except OSError:
            # The disk has some writes, and the system takes all of them for synced.
            file.writes = [write for write in file.writes if self.rng.random() < 0.5]
            file.sync()
            raise
        self._operation(file.sync if self.rng.random() < 0.5 else lambda: None)
        file.sync()

    def pwrite(self, handle, data, offset):
        file = self._file(handle)
        try:
            self._falter("pwrite", handle)
        except OSError:
            if handle not in self._stale:
                self._write(file, handle, offset, data[: self._part(handle, offset, data)])
            raise
        data = self._fitting(handle, data, offset)
        part = data[: self._part(handle, offset, data)] if self.kill_in == 1 else b""
        self._operation(lambda: self._write(file, handle, offset, part))
        self._write(file, handle, offset, data)
        return len(data)

    def ftruncate(self, handle, size):
        self._operation()
        if self.room is not None:
            self.room += os.fstat(handle).st_size - size
        self._file(handle).writes.append((size, None))
        os.ftruncate(handle, size)

    def _file(self, handle):
        inode = os.fstat(handle).st_ino
        if inode not in self._files:
            self._files[inode] = File(os.pread(handle, 1 << 30, 0))
        file = self._files[inode]
        if file.is_new:
            file.is_new, file.writes = False, [(0, os.pread(handle, 1 << 30, 0))]
        return file

    def _part(self, handle, offset, data):
        return part_of(self.rng, os.fstat(handle).st_size, offset, data)

    def _write(self, file, handle, offset, data):
        if data:
            file.writes.append((offset, data))
            os.pwrite(handle, data, offset)

    def _fitting(self, handle, data, offset):
        """Return as much of ``data`` as there is room for."""
        grows = max(0, offset + len(data) - os.fstat(handle).st_size)
        if self.room is not None:
            data = data[: len(data) - max(grows - self.room, 0)]
            if not data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= min(grows, self.room)
        return data

    def _operation(self, partly=lambda: None):
        """Kill the process if its time has come, in the middle of what it does."""
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in <= 0:
                self.kill_in = None
                partly()
                self.kill()
                raise Killed

    def _falter(self, call, handle=None):
        """Raise the disk's error in most operations; a file that was open on a server that is away stays stale."""
        if handle is not None and handle in self._stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        calls, number, share = self.failing or ((), 0, 0.0)
        if call in calls and (share == 1.0 or self.rng.random() < share):
            if handle is not None and number == errno.ESTALE:
                self._stale.add(handle)
            raise OSError(number, os.strerror(number))
