# SPDX-License-Identifier: Apache-2.0
"""A disk that forgets what was not synced when its power fails, that can be full, and whose user may be killed at any
of its operations."""

import errno
import io
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

SECTOR = 512
"""Bytes that a disk writes whole or not at all."""


class Killed(Exception):
    """The process is killed at this point."""


@dataclass
class Inode:
    """A file: what is safe, what was written since (``(offset, data)``, or ``(size, None)`` for a cut), and how it
    looks."""

    safe: bytes = b""
    unsafe: list[tuple[int, bytes | None]] = field(default_factory=list)
    content: bytes = b""

    def write(self, offset: int, data: bytes | None) -> None:
        self.unsafe.append((offset, data))
        self.content = _written(self.content, offset, data)

    def sync(self) -> None:
        """Make the writes safe; those that a failed sync has lost stay lost."""
        for offset, data in self.unsafe:
            self.safe = _written(self.safe, offset, data)
        self.unsafe = []

    def fail_sync(self, rng: Random) -> None:
        """The disk has some writes, and the system takes all of them for synced."""
        self.unsafe = [write for write in self.unsafe if rng.random() < 0.5]
        self.sync()

    def power_fails(self, rng: Random) -> None:
        """Of each write since the last sync everything, a part, or nothing is there."""
        content = self.safe
        for offset, data in self.unsafe:
            kept = rng.choice((0, len(data or b""), _part(rng, self.safe, offset, data or b"")))
            if data is None and rng.random() < 0.5:
                content = _written(content, offset, None)
            elif data and kept:
                content = _written(content, offset, data[:kept])
        self.content = self.safe = content
        self.unsafe = []


def _part(rng: Random, content: bytes, offset: int, data: bytes) -> int:
    """How much of a write that was cut short is there: any part of what makes a file longer, whole sectors of what it
    had."""
    if offset + len(data) > len(content):
        return rng.randint(0, len(data))
    first = -offset % SECTOR
    return rng.choice((0, *range(first, len(data), SECTOR), len(data)))


def _written(content: bytes, offset: int, data: bytes | None) -> bytes:
    if data is None:
        return content[:offset].ljust(offset, b"\0")
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


class SimDisk:
    """Files of one folder.

    Attributes:
        room: bytes that files may still grow by; None: no limit.
        kill_in: operations until the process that uses the disk is killed; None: never.
        error: what operations fail with while the disk falters, None: they succeed.
    """

    def __init__(self, rng: Random) -> None:
        self.rng, self.faults = rng, Random(0)
        self.files: dict[str, Inode] = {}
        self.safe_names: dict[str, Inode] = {}
        self.room: int | None = None
        self.kill_in: int | None = None
        self.error: int | None = None

    def falter(self, handle: "Handle | None" = None) -> None:
        """Raise the disk's error, in most operations; a file that was open on a server that is away stays stale."""
        if handle is not None and handle.is_stale:
            raise OSError(errno.ESTALE, "stale file handle")
        if self.error is not None and self.faults.random() < 0.7:
            if handle is not None and self.error == errno.ESTALE:
                handle.is_stale = True
            raise OSError(self.error, "the disk falters")

    def path(self, name: str) -> "SimPath":
        return SimPath(self, name)

    def sync_folder(self) -> None:
        self.operation()
        self.safe_names = dict(self.files)

    def power_fails(self) -> None:
        """Keep what is synced, and any part of what is not."""
        names = {**self.safe_names, **{name: inode for name, inode in self.files.items() if self.rng.random() < 0.5}}
        self.files = self.safe_names = {name: inode for name, inode in names.items() if name in names}
        for inode in self.files.values():
            inode.power_fails(self.rng)

    def operation(self, partly: Callable[[], None] = lambda: None) -> None:
        """Something is about to happen on the disk; a process that is killed in it may have done it partly."""
        if self.kill_in is None:
            return
        self.kill_in -= 1
        if self.kill_in <= 0:
            self.kill_in = None
            partly()
            raise Killed

    def write(self, inode: Inode, offset: int, data: bytes) -> int:
        """Write as much as there is room for."""
        grows = max(0, offset + len(data) - len(inode.content))
        if self.room is not None and grows > self.room:
            data = data[: len(data) - (grows - self.room)]
            if not data:
                raise OSError(28, "No space left on device")
            grows = self.room
        part = data[: _part(self.rng, inode.content, offset, data)] if self.kill_in == 1 else b""
        self.operation(lambda: inode.write(offset, part) if part else None)
        inode.write(offset, data)
        if self.room is not None:
            self.room -= grows
        return len(data)

    def cut(self, inode: Inode, size: int) -> None:
        """Make a file shorter."""
        self.operation()
        if self.room is not None:
            self.room += len(inode.content) - size
        inode.write(size, None)

    def sync(self, inode: Inode) -> None:
        """Make what a file holds safe."""
        self.operation(inode.sync if self.rng.random() < 0.5 else lambda: None)
        inode.sync()


class SimPath:
    """As much of a path as a journal needs."""

    def __init__(self, disk: SimDisk, name: str) -> None:
        self.disk, self.name = disk, name

    def __str__(self) -> str:
        return self.name

    @property
    def parent(self) -> "SimPath":
        return SimPath(self.disk, "")

    def with_name(self, name: str) -> "SimPath":
        return SimPath(self.disk, "temporary" if name.endswith(".tmp") else name)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        pass

    def exists(self) -> bool:
        return self.name in self.disk.files

    def read_bytes(self) -> bytes:
        self.disk.falter()
        return self.disk.files[self.name].content

    def unlink(self, missing_ok: bool = False) -> None:
        self.disk.files.pop(self.name, None)


class Handle(int):
    """An open file, as a number."""

    disk: SimDisk
    inode: Inode | None
    is_stale = False


def _open(path: SimPath, flags: int) -> Handle:
    path.disk.falter()
    handle = Handle(3)
    handle.disk, handle.inode = path.disk, path.disk.files[path.name]
    return handle


class SimFile:
    """A new file open for writing."""

    def __init__(self, path: SimPath) -> None:
        path.disk.operation()
        path.disk.files[path.name] = Inode()
        self.handle, self.buffer = _open(path, 0), b""

    def __enter__(self) -> "SimFile":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def write(self, data: bytes) -> int:
        self.buffer += data
        return len(data)

    def flush(self) -> None:
        while self.buffer:
            self.buffer = self.buffer[_pwrite(self.handle, self.buffer, len(self.handle.inode.content)) :]

    def fileno(self) -> Handle:
        return self.handle


def open_file(path: SimPath, mode: str) -> SimFile:
    """``open(path, "xb")``."""
    assert mode == "xb"
    return SimFile(path)


def _pread(handle: Handle, size: int, offset: int) -> bytes:
    handle.disk.falter(handle)
    return handle.inode.content[offset : offset + size]


def _fsync(handle: Handle) -> None:
    try:
        handle.disk.falter(handle)
    except OSError:
        handle.inode.fail_sync(handle.disk.faults)
        raise
    handle.disk.sync(handle.inode)


def _pwrite(handle: Handle, data: bytes, offset: int) -> int:
    try:
        handle.disk.falter(handle)
    except OSError:
        part = data[: handle.disk.faults.randint(0, len(data))]
        if part and not handle.is_stale:
            handle.inode.write(offset, part)
        raise
    return handle.disk.write(handle.inode, offset, data)


def _link(source: SimPath, target: SimPath) -> None:
    source.disk.operation()
    if target.exists():
        raise FileExistsError
    source.disk.files[target.name] = source.disk.files[source.name]


def _rename(source: SimPath, target: SimPath) -> None:
    source.disk.operation()
    source.disk.files[target.name] = source.disk.files.pop(source.name)


system = types.SimpleNamespace(
    O_RDONLY=0,
    O_RDWR=2,
    open=_open,
    close=lambda handle: None,
    pread=_pread,
    pwrite=_pwrite,
    ftruncate=lambda handle, size: handle.disk.cut(handle.inode, size),
    fchmod=lambda handle, mode: None,  # who may read a file is no matter of crashes
    fsync=_fsync,
    fstat=lambda handle: types.SimpleNamespace(st_size=len(handle.inode.content), st_nlink=1),
    link=_link,
    replace=_rename,
)
"""As much of ``os`` as a journal needs."""

_SILENT = logging.getLogger("simulated")
_SILENT.disabled = True

SUBSTITUTES = {
    "dlrover.python.rl.common.private_files": types.SimpleNamespace(
        open_file=lambda path: io.BytesIO(path.read_bytes())
    ),
    "dlrover.python.rl.common.log": types.SimpleNamespace(get_logger=lambda name: _SILENT),
    "os": system,
    "fcntl": types.SimpleNamespace(LOCK_UN=8, flock=lambda handle, how: None),
    "dlrover.python.rl.runtime.checkpoint.store": types.SimpleNamespace(
        TAKE_OVER_S=5.0, take_lock=lambda handle, path, timeout_s=0.0: None
    ),
    "dlrover.python.rl.runtime.checkpoint.state_file": types.SimpleNamespace(
        new_file=None, sync_folder=lambda path: path.disk.sync_folder()
    ),
}
"""What a journal's module imports, to what it gets instead."""
