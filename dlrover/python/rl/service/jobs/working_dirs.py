# SPDX-License-Identifier: Apache-2.0
"""The folders that jobs bring: packed by the client, named by the SHA-256 of their archive, unpacked by the service.

::

    folder -> pack() -> archive --parts--> WorkingDirs.add_part() -> <root>/working-dirs/<digest>, read-only

An archive depends on the files alone, so that the same folder is sent and stored once. A stored folder stays, since
runs that used it may be resumed.
"""

import hashlib
import hmac
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from dlrover.python.rl.common.errors import ConfigError, InvalidJob

FOLDER, IGNORE = "working-dirs", ".dlrover-rl-ignore"
MAX_BYTES, MAX_FILES = 512 * 1024 * 1024, 20_000
PART = 1024 * 1024
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


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Extract a plain file below ``folder``. Raises InvalidJob for anything else, with the name of the member."""
    if not member.isreg():
        raise _refused(member.name[:200], "is no plain file")
    try:
        tar.extract(member, folder, filter="data")
    except tarfile.FilterError as error:
        raise _refused(member.name[:200], f"is refused: {error}") from error


class WorkingDirs:
    """The folders below ``root``. Blocking; parts of one archive come from one client at a time."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    def find(self, digest: str) -> Path:
        """Return a stored folder. Raises InvalidJob."""
        if not _DIGEST.fullmatch(digest) or not (self._folder / digest).is_dir():
            raise InvalidJob([ConfigError("working_dir", "was not uploaded")])
        return self._folder / digest

    def add_part(self, digest: str, owner: str, size: int, offset: int, data: bytes) -> int:
        """Add bytes of an archive at ``offset``; return how many of ``size`` there are. Raises InvalidJob for an
        archive that differs from its digest, or has a member that is not below the folder."""
        if not _DIGEST.fullmatch(digest) or not 0 < size <= _MAX_ARCHIVE:
            raise InvalidJob([ConfigError("working_dir", f"has {size:,} bytes; at most {_MAX_ARCHIVE:,} are allowed")])
        target = self._folder / digest
        if target.is_dir():
            return size
        self._folder.mkdir(mode=0o755, exist_ok=True)
        part = self._folder / f".{digest}.{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
        with part.open("ab") as file:
            received = file.tell()
            if offset == received and data:
                received += file.write(data[: size - received])
        if received < size:
            return received
        try:
            with part.open("rb") as file:
                if not hmac.compare_digest(hashlib.file_digest(file, "sha256").hexdigest(), digest):
                    raise InvalidJob([ConfigError("working_dir", "differs from its digest: send it again")])
            self._unpack(part, target)
        finally:
            part.unlink(missing_ok=True)
        return size

    def _unpack(self, archive: Path, target: Path) -> None:
        folder = archive.with_suffix(f"{archive.suffix}.d")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            with tarfile.open(archive, "r:") as tar:
                for member in tar:
                    _extract(tar, member, folder)
            for path in folder.rglob("*"):
                path.chmod(path.stat().st_mode & ~0o222)
            folder.rename(target)
        except tarfile.TarError as error:
            raise InvalidJob([ConfigError("working_dir", f"is not an archive: {error}")]) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
