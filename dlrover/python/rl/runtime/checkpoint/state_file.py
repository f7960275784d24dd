# SPDX-License-Identifier: Apache-2.0
"""One saved state in one file, with a checksum over every byte.

The file, all numbers little-endian::

    magic 8 | version u32 | 0 u32 | total length u64 | length of table u64 | length of skeleton u64
    table     JSON: {"header": the writer's, "sizes": bytes in each buffer}
    skeleton  JSON, see data/state_tree.py
    buffers   each at a multiple of 64
    crc32     u32, of all bytes before it

A file is renamed once it is complete. Its last four bytes are the checksum of :class:`StateFile`, so that it can be
checked with and without the manifest.
"""

import errno
import json
import mmap
import os
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from isal.isal_zlib import crc32

from dlrover.python.rl.common.disk_space import disk_full_error, is_disk_full
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, DataError
from dlrover.python.rl.data.state_tree import Buffer, StateTree, dump_in_place, load

VERSION = 1

_MAGIC = b"DLRLstat"
_PREFIX = struct.Struct("<8sIIQQQ")
_CRC = struct.Struct("<I")
_ALIGN = 64
_BUFFER = 1 << 16
_CHUNK = 1 << 20
_RESIDUE = 0x2144DF1C  # crc32 of anything that ends with its own crc32

Header = Mapping[str, str | int]


@dataclass(frozen=True)
class StateFile:
    name: str  # inside its folder
    nbytes: int
    checksum: int  # crc32 of all but the last four bytes, which hold the same number
    node: str = ""  # id of the node that has it, "" for a folder that every node sees


def write_state(path: Path, header: Header, tree: Any, durable: bool, recycled: Path | None = None) -> StateFile:
    """Write ``tree`` (see data/state_tree.py), which may be dumped in place and must not change, to ``path``, whole or
    not at all.

    Args:
        header: the owner of the state (role, rank, step, ...), to detect files that were mixed up.
        durable: sync file and folder to disk before returning.
        recycled: an unneeded file on the same disk, whose pages are overwritten.

    Raises DataError if ``tree`` cannot be saved, OSError with ``path`` unchanged.
    """
    state = tree if isinstance(tree, StateTree) else dump_in_place(tree)
    table = json.dumps({"header": dict(header), "sizes": [len(buffer) for buffer in state.buffers]}).encode()
    at = _PREFIX.size + len(table) + len(state.skeleton)
    body: list[Buffer] = []
    for buffer in state.buffers:
        body += [memoryview(bytes(-at % _ALIGN)), buffer]
        at += -at % _ALIGN + len(buffer)
    total = at + _CRC.size
    prefix = _PREFIX.pack(_MAGIC, VERSION, 0, total, len(table), len(state.skeleton))
    parts = [memoryview(prefix), memoryview(table), memoryview(state.skeleton), *body]
    checksum = 0
    # Closed also after an error: buffers of a device have one reader at a time.
    with new_file(path, durable, total, recycled) as file, closing(_chunks(parts)) as chunks:
        for chunk in chunks:
            checksum = crc32(chunk, checksum)
            file.write(chunk)
        file.write(_CRC.pack(checksum))
    return StateFile(path.name, total, checksum)


def read_state(path: Path, expected: StateFile | None = None, header: Header | None = None) -> Any:
    """Return the tree in the file at ``path`` after a check of every byte. Arrays and tensors are writable views of the
    one buffer that holds the file. ``header``: items that the file's header must have. Raises CheckpointMissing,
    CheckpointCorrupt for changed bytes or another owner's file, OSError."""
    with _opened(path) as file:
        return read_opened(file, str(path), os.fstat(file.fileno()).st_size, expected, header)


def read_opened(
    file: Any, name: str, nbytes: int, expected: StateFile | None = None, header: Header | None = None
) -> Any:
    """Like :func:`read_state` from an open file of ``nbytes``, which must be the expected ones to fit the memory."""
    _check_length(name, nbytes, expected)
    memory = mmap.mmap(-1, max(nbytes, 1))  # aligned like the buffers in the file
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)  # else allocating pages takes half of the time
    content, filled, checksum = memoryview(memory), 0, 0
    while filled < nbytes and (count := file.readinto(content[filled : min(filled + _CHUNK, nbytes)])):
        checksum = crc32(content[filled : filled + count], checksum)
        filled += count
    content = content[:filled]
    _check(name, filled, checksum, bytes(content[-_CRC.size :]), expected)
    return _decode(name, content, header or {})


def check_file(folder: Path, expected: StateFile, consume: Callable[[memoryview], Any] | None = None) -> None:
    """Read a whole file, pass its chunks to ``consume``, and verify length and checksum; raises as read_state."""
    path = folder / expected.name
    memory = memoryview(bytearray(_CHUNK))
    nbytes, checksum, ending = 0, 0, b""
    with _opened(path) as file:
        while nbytes <= expected.nbytes and (count := file.readinto(memory)):  # type: ignore[attr-defined]
            chunk = memory[:count]
            nbytes, checksum = nbytes + count, crc32(chunk, checksum)
            ending = (ending + bytes(chunk[-_CRC.size :]))[-_CRC.size :]
            if consume is not None:
                consume(chunk)
    _check(path, nbytes, checksum, ending, expected)


def check_size(folder: Path, expected: StateFile) -> None:
    """Compare only the length; raises as :func:`read_state`."""
    path = folder / expected.name
    try:
        nbytes = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointMissing(f"{path} is not there") from None
    _check_length(path, nbytes, expected)


def copy_file(source: Path, target: Path, file: StateFile, durable: bool) -> StateFile:
    """Check and copy an intact ``file``. Raises as :func:`read_state` and :func:`write_state`."""
    with new_file(target / file.name, durable, file.nbytes) as copy:
        check_file(source, file, copy.write)
    return replace(file, node="")


def write_whole(folder: Path, file: StateFile, content: memoryview) -> None:
    """Write intact ``content`` as ``file``; several processes may do so at once. Raises CheckpointCorrupt, OSError."""
    _check(folder / file.name, len(content), crc32(content), bytes(content[-_CRC.size :]), file)
    with new_file(folder / file.name, durable=False, nbytes=file.nbytes) as copy:
        copy.write(content)


def write_part(folder: Path, file: StateFile, start: int, content: memoryview, recycled: Path | None = None) -> None:
    """Write the next part of a copy of ``file``; with the last part an intact copy gets its name. See
    :func:`write_state` for ``recycled``. Raises CheckpointCorrupt, CheckpointMissing, OSError."""
    temporary = folder / f".{file.name}.part.tmp"
    if start == 0:
        _check_space(folder, file.nbytes, recycled)
        _open_new(temporary, recycled).close()
    with open(temporary, "r+b") as parts:
        parts.seek(start)
        parts.write(content)
        if is_last := start + len(content) >= file.nbytes:
            parts.truncate()
    if is_last:
        check_file(folder, replace(file, name=temporary.name))
        os.replace(temporary, folder / file.name)


@contextmanager
def new_file(
    path: Path, durable: bool, nbytes: int = 0, recycled: Path | None = None, exclusive: bool = False
) -> Iterator[BinaryIO]:
    """Open a file that gets its name if the block succeeds, and is removed otherwise. Nothing is written to a disk with
    less space than ``nbytes``. See :func:`write_state`. Raises FileExistsError if it is ``exclusive`` and exists."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    _check_space(path.parent, nbytes, recycled)
    try:
        with _open_new(temporary, recycled) as file:
            yield file
            file.truncate()
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
            temporary.unlink()
        else:
            os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and is_disk_full(error):
            raise disk_full_error(error.errno or errno.ENOSPC, path.parent, nbytes) from error
        raise
    if durable:
        sync_folder(path.parent)


def make_folder(folder: Path, durable: bool, mode: int = 0o777) -> None:
    """Create a folder and its parents; ``durable`` names are on disk when this returns."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    for each in missing if durable else ():
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _chunks(parts: Iterable[Buffer]) -> Generator[memoryview, None, None]:
    """Yield the bytes in pieces that stay in the CPU cache between checksum and write."""
    for part in parts:
        for piece in (part,) if isinstance(part, memoryview) else part.pieces():
            for start in range(0, len(piece), _CHUNK):
                yield piece[start : start + _CHUNK]


def _open_new(path: Path, recycled: Path | None) -> BinaryIO:
    """Open ``recycled`` as ``path``, to overwrite it; a new file if it is missing."""
    if recycled is not None:
        with suppress(OSError):
            recycled.rename(path)
    # For the user only: a state has a model and its training data.
    opener = partial(os.open, mode=0o600)
    return open(path, "r+b" if path.exists() else "xb", buffering=_BUFFER, opener=opener)


def _check_space(folder: Path, nbytes: int, recycled: Path | None) -> None:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    with suppress(OSError):
        free += recycled.stat().st_size if recycled is not None else 0
    if free < nbytes:
        raise disk_full_error(errno.ENOSPC, folder, nbytes)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 -- only the opening may say that the file is missing
    except FileNotFoundError:
        raise CheckpointMissing(f"{path} is not there") from None
    with file:
        yield file


def _check_length(path: Path | str, nbytes: int, expected: StateFile | None) -> None:
    if expected is not None and nbytes != expected.nbytes:
        raise CheckpointCorrupt(str(path), f"{nbytes} bytes instead of {expected.nbytes}")


def _check(path: Path | str, nbytes: int, checksum: int, ending: bytes, expected: StateFile | None) -> None:
    _check_length(path, nbytes, expected)
    if checksum != _RESIDUE or nbytes < _PREFIX.size + _CRC.size:
        raise CheckpointCorrupt(str(path), "the content does not match the checksum at its end")
    if expected is not None and _CRC.unpack(ending) != (expected.checksum,):
        raise CheckpointCorrupt(str(path), "it is another file than the manifest's")


def _decode(path: Path | str, content: memoryview, header: Header) -> Any:
    magic, version, _, total, table_size, skeleton_size = _PREFIX.unpack_from(content)
    if magic != _MAGIC or version != VERSION or total != len(content):
        raise CheckpointCorrupt(str(path), f"not a state file of format {VERSION} ({magic!r}, format {version})")
    try:
        at = _PREFIX.size + table_size
        table = json.loads(bytes(content[_PREFIX.size : at]))
        owner: Header = table["header"]
        wrong = {name: owner.get(name) for name, value in header.items() if owner.get(name) != value}
        if wrong:
            raise CheckpointCorrupt(str(path), f"it belongs to {wrong}, not to {dict(header)}")
        skeleton = bytes(content[at : at + skeleton_size])
        at += skeleton_size
        buffers = []
        for size in table["sizes"]:
            at += -at % _ALIGN
            buffers.append(content[at : at + size])
            at += size
        return load(skeleton, buffers)
    except (ValueError, KeyError, DataError) as error:
        raise CheckpointCorrupt(str(path), f"it holds no state: {error}") from error
