# SPDX-License-Identifier: Apache-2.0
"""The folders that jobs bring: packed by the client, named by the SHA-256 of their archive, unpacked by the service.

::

    folder -> pack() -> archive --parts--> WorkingDirs.add_part() -> <root>/working-dirs/<digest>, read-only

An archive depends on the files alone, so that the same folder is sent and stored once. A stored folder stays as long as
the service remembers a run that used it, which may be resumed.
"""

import errno
import hashlib
import hmac
import os
import re
import shutil
import stat
import tarfile
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, ServiceUnavailable

FOLDER, IGNORE = "working-dirs", ".dlrover-rl-ignore"
MAX_BYTES, MAX_FILES = 512 * 1024 * 1024, 20_000
PART = 1024 * 1024
_KEPT_S = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAX_ARCHIVE = MAX_BYTES + MAX_FILES * 2048
_IGNORED = (".git", "__pycache__", ".venv", "runs", "*.pyc")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def pack(folder: Path, archive: BinaryIO) -> str:
    """Write the files of ``folder`` to ``archive``; return its digest. Raises InvalidJob for a link out of the folder,
    a device, too many files or bytes, and names the file."""
    top, sizes = folder.resolve(), dict[str, int]()
    if not top.is_dir():
        raise InvalidJob([ConfigError("--working-dir", f"no such folder: {folder}")])
    for path in _list_files(top):
        name, state = path.relative_to(top).as_posix(), path.stat() if path.exists() else None
        if not path.resolve().is_relative_to(top):
            raise _refused(name, f"is a link out of {folder}")
        if state is None or not stat.S_ISREG(state.st_mode):
            raise _refused(name, "is no plain file, nor a link to one")
        sizes[name] = state.st_size
    if sum(sizes.values()) > MAX_BYTES or len(sizes) > MAX_FILES:
        largest = max(sizes, key=lambda name: sizes[name])
        total = f"{len(sizes)} files with {sum(sizes.values()) / 1e6:,.0f} MB"
        limit = f"at most {MAX_FILES:,} with {MAX_BYTES / 1e6:,.0f} MB are allowed"
        raise _refused(largest, f"is the largest of {total}, and {limit}: list what the job does not need in {IGNORE}")
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, size in sorted(sizes.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = size, 0o755 if os.access(top / name, os.X_OK) else 0o644
            with (top / name).open("rb") as file:
                tar.addfile(entry, file)
    archive.seek(0)
    digest = hashlib.sha256()
    while part := archive.read(PART):
        digest.update(part)
    return digest.hexdigest()


def _list_files(top: Path) -> Iterator[Path]:
    """Yield the files that are not ignored, and links to folders."""
    ignore = top / IGNORE
    lines = ignore.read_text(encoding="utf-8").splitlines() if ignore.is_file() else []
    patterns = [*_IGNORED, *(line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#"))]

    def is_ignored(path: Path) -> bool:
        relative = path.relative_to(top).as_posix()
        return any(fnmatchcase(path.name, each) or fnmatchcase(relative, each) for each in patterns)

    for parent, folders, files in os.walk(top):
        entries = [Path(parent, name) for name in (*folders, *files)]
        folders[:] = sorted(name for name in folders if not is_ignored(Path(parent, name)))
        yield from (path for path in entries if not is_ignored(path) and (path.is_symlink() or not path.is_dir()))


def _refused(name: str, fault: str) -> InvalidJob:
    return InvalidJob([ConfigError(f"working_dir: {name}", fault)])


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Extract plain files below ``folder``, as many as ``pack`` allows. Raises InvalidJob for anything else, with the
    name of the member."""
    count = size = 0
    for member in tar:
        name, count, size = member.name[:200], count + 1, size + member.size
        if not member.isreg() or member.issparse():
            raise _refused(name, "is no plain file")
        if count > MAX_FILES or size > MAX_BYTES:
            raise _refused(name, f"is above the limit of {MAX_FILES:,} files with {MAX_BYTES / 1e6:,.0f} MB")
        try:
            tar.extract(member, folder, filter="data")
        except tarfile.FilterError as error:
            raise _refused(name, f"is refused: {error}") from error
        except OSError as error:
            if error.errno in _FULL:
                raise
            raise _refused(name, f"cannot be written: {error.strerror}") from error


def _protect(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            path = Path(parent, name)
            path.chmod(path.stat().st_mode & ~0o222)
        Path(parent).chmod(0o555)


def _remove(folder: Path) -> None:
    """Remove a folder, protected or not."""
    for parent, _, _ in os.walk(folder):
        Path(parent).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _is_old(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _KEPT_S
    return False


class WorkingDirs:
    """The folders below ``root``; blocking."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER
        self._locks = [threading.Lock() for _ in range(256)]  # by the first byte of a digest

    def find(self, digest: str) -> Path:
        """Return a stored folder. Raises InvalidJob."""
        if not _DIGEST.fullmatch(digest) or not (self._folder / digest).is_dir():
            raise InvalidJob([ConfigError("working_dir", "was not uploaded")])
        return self._folder / digest

    def add_part(self, digest: str, owner: str, size: int, offset: int, data: bytes) -> int:
        """Add bytes of an archive at ``offset``; return how many of ``size`` there are. Raises InvalidJob for an
        archive that differs from its digest, or has a member that is not below the folder, and ServiceUnavailable if
        the disk is full."""
        if not _DIGEST.fullmatch(digest) or not 0 < size <= _MAX_ARCHIVE:
            raise InvalidJob([ConfigError("working_dir", f"has {size:,} bytes; at most {_MAX_ARCHIVE:,} are allowed")])
        part = self._folder / f".{digest}.{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
        try:
            with self._lock(digest):
                return self._add(part, self._folder / digest, size, offset, data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise ServiceUnavailable(f"the service has no room for the folder: {error.strerror}") from error

    def remove_unused(self, used: Collection[str]) -> None:
        """Remove what is older than an hour: unfinished uploads, and stored folders that none of the paths ``used``,
        relative to the root, is in."""
        in_use = {Path(path).parts[1] for path in used if path.startswith(f"{FOLDER}/")}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            digest = path.name.lstrip(".").partition(".")[0]
            if path.name in in_use or not _DIGEST.fullmatch(digest) or not _is_old(path):
                continue
            with self._lock(digest):
                if not _is_old(path):
                    continue
                if not path.name.startswith("."):  # never leave a part of it under its digest
                    path = path.rename(tempfile.mkdtemp(prefix=f".{digest}.", dir=self._folder))
                if path.is_file():
                    path.unlink()
                else:
                    _remove(path)

    def _lock(self, digest: str) -> threading.Lock:
        return self._locks[int(digest[:2], 16)]

    def _add(self, part: Path, target: Path, size: int, offset: int, data: bytes) -> int:
        if target.is_dir():
            os.utime(target)  # a job that needs it will be submitted
            return size
        self._folder.mkdir(mode=0o755, exist_ok=True)
        with part.open("ab") as file:
            received = file.tell()
            if offset == received and data:
                received += file.write(data[: size - received])
        if received < size:
            return received
        try:
            with part.open("rb") as file:
                if not hmac.compare_digest(hashlib.file_digest(file, "sha256").hexdigest(), target.name):
                    raise InvalidJob([ConfigError("working_dir", "differs from its digest: send it again")])
            self._unpack(part, target)
        finally:
            part.unlink(missing_ok=True)
        return size

    def _unpack(self, archive: Path, target: Path) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=self._folder))
        try:
            with tarfile.open(archive, "r:") as tar:
                _extract(tar, folder)
            _protect(folder)
            try:
                folder.rename(target)
            except OSError:
                if not target.is_dir():  # else another service has stored the same files
                    raise
        except tarfile.TarError as error:
            raise InvalidJob([ConfigError("working_dir", f"is not an archive: {error}")]) from error
        finally:
            _remove(folder)
