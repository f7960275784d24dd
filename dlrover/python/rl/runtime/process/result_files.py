# SPDX-License-Identifier: Apache-2.0
"""The files of a run's folder that clients may read: opened part by part, following no link."""

import os
import stat
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import valid_text
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId, hint
from dlrover.python.rl.common.no_links import open_below, open_folder

LOGS = "logs"
SUFFIX = ".log"
KEPT_LOGS = 3
"""Log files of a process, the current one included; the others are ``rollout-1.log.1``, and so on."""

_CHUNK = 256 * 1024
_MAX_TAIL = 16 * 1024 * 1024
_MAX_FILES, _DEEPEST = 10_000, 50
_MAX_LINE = 64 * 1024
_MASTER = "master"
# The system's own files: commits are large and internal, the journal and the owner's record are no results.
_PRIVATE = ("commits", "checkpoints", "journal*.jsonl", "owner.*.json", "*.tmp", ".*")


@dataclass(frozen=True)
class RunFile:
    path: str
    size: int


class RunFolder:
    """The files below an absolute folder, which is opened once and held; no part of its path may be a link.
    Raises InvalidJob when it is, and when a file is missing, private, a link, or no plain file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _top(self) -> int:
        try:
            descriptor = open_folder(self._folder)
        except NotADirectoryError as error:
            why = "is no folder, or is reached through a link that was put there later: its files are not read"
            raise _missing(str(self._folder), why) from error
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def check(self) -> None:
        """Raises InvalidJob if the folder is a link now, or is below one; it may be missing."""
        with suppress(OSError):
            os.fstat(self._top)

    def list_files(self) -> list[RunFile]:
        """Return the files whose names are UTF-8, in folders of at most ``_DEEPEST`` levels."""
        return [file for file, _ in zip(self._walk(()), range(_MAX_FILES), strict=False)]

    def _walk(self, parts: tuple[str, ...]) -> Iterator[RunFile]:
        with ExitStack() as opened, suppress(FileNotFoundError, NotADirectoryError):
            folder = open_below(self._top, (*parts, "."), os.O_DIRECTORY)
            opened.callback(os.close, folder)
            entries = opened.enter_context(os.scandir(folder))
            for entry in sorted(entries, key=lambda entry: entry.name):
                inner = (*parts, entry.name)
                if _is_private(inner) or entry.is_symlink() or valid_text(entry.name) != entry.name:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(inner) if len(inner) < _DEEPEST else ()
                elif entry.is_file(follow_symlinks=False) and (nbytes := _size_of(entry)) is not None:
                    yield RunFile("/".join(inner), nbytes)

    def read(self, parts: tuple[str, ...], offset: int) -> Generator[bytes, None, None]:
        if _is_private(parts):
            raise _missing("/".join(parts), "is not a file that is served")
        with self.open(parts) as descriptor:
            while chunk := os.pread(descriptor, _CHUNK, offset):
                yield chunk
                offset += len(chunk)

    @contextmanager
    def open(self, parts: tuple[str, ...]) -> Iterator[int]:
        """A descriptor of a plain file. No part may be a link, which could be exchanged after a check."""
        try:
            descriptor = self.descriptor(parts)
        except (OSError, ValueError) as error:
            near = hint("/".join(parts), [file.path for file in self.list_files()])
            raise _missing("/".join(parts), f"no such file{near}") from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def descriptor(self, parts: tuple[str, ...]) -> int:
        """As :meth:`open`, for the caller to close. Raises OSError and ValueError if there is no such file."""
        descriptor = open_below(self._top, parts)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise _missing("/".join(parts), "is no plain file")

    def processes(self) -> list[str]:
        """The processes that have a log."""
        return sorted(
            file.path.removeprefix(f"{LOGS}/").removesuffix(SUFFIX)
            for file in self._walk((LOGS,))
            if file.path.endswith(SUFFIX) and file.path.count("/") == 1
        )


class LogReader:
    """Reads what one process has written, or all of them, on from where it was; ``tail`` limits the first reading to
    the last lines of each, and to 16 MB."""

    def __init__(self, folder: RunFolder, process: str = "", tail: int = 0) -> None:
        self._folder, self._process, self._tail = folder, process, tail
        self._positions: dict[str, _LogPosition] = {}

    def check(self, coming: Mapping[str, int] | None = None) -> None:
        """Raises InvalidJob if the process has no log, or if it is none of a job whose logs are ``coming``, which has
        these members by role."""
        known = self._folder.processes()
        if not self._process or self._process in known:
            return
        if coming is not None:
            known += [TRAINER_ID.log_name, _MASTER]
            known += [ProcessId(role, rank).log_name for role, num in coming.items() for rank in range(num)]
        if coming is None or self._process not in known:
            raise _missing(self._process, f"has no log{hint(self._process, known)}" if known else "has no log yet")

    def read(self) -> Iterator[tuple[str, str]]:
        """Whole lines that were written since, with the process that wrote them."""
        for name in [self._process] if self._process else self._folder.processes():
            while data := self._more(name):
                yield name, data.decode("utf-8", "replace")

    def _more(self, process: str) -> bytes:
        """The next whole lines of a process, from the older files first."""
        with ExitStack() as opened:
            files = self._files(process, opened)
            if files and process not in self._positions:
                self._positions[process] = self._begin(files)
            for at, file in enumerate(files):
                position = self._positions[process]
                if file.inode != position.inode and any(other.inode == position.inode for other in files[at + 1 :]):
                    continue  # it was read before
                if file.inode != position.inode or file.size < position.offset:
                    position = self._positions[process] = _LogPosition(file.inode, 0)
                data = os.pread(file.descriptor, _CHUNK, position.offset)
                is_complete = at < len(files) - 1
                whole = data.rfind(b"\n") + 1
                if not whole and (is_complete or len(data) >= _MAX_LINE):
                    whole = len(data)
                position.offset += whole
                if whole:
                    return data[:whole]
        return b""

    def _files(self, process: str, opened: ExitStack) -> list["_LogFile"]:
        """The oldest first. They are opened from the newest on, so that a rotation in between hides none."""
        files: dict[int, _LogFile] = {}
        for number in range(KEPT_LOGS):
            name = f"{process}{SUFFIX}" + (f".{number}" if number else "")
            with suppress(OSError, ValueError, InvalidJob):
                descriptor = self._folder.descriptor((LOGS, name))
                opened.callback(os.close, descriptor)
                state = os.fstat(descriptor)
                files[state.st_ino] = _LogFile(descriptor, state.st_ino, state.st_size)
        return list(files.values())[::-1]

    def _begin(self, files: list["_LogFile"]) -> "_LogPosition":
        """Where the last ``tail`` lines begin, or everything."""
        left, room = self._tail, _MAX_TAIL
        for file in reversed(files if self._tail else ()):
            end = file.size
            while end:
                begin = max(end - _CHUNK, 0)
                data = os.pread(file.descriptor, end - begin, begin)
                room -= len(data)
                count = data.count(b"\n")
                if count > left or room < _CHUNK:
                    return _LogPosition(file.inode, begin + _start_of_last(data, min(left, max(count - 1, 0))))
                left, end = left - count, begin
        return _LogPosition(files[0].inode, 0)


@dataclass
class _LogPosition:
    inode: int
    offset: int


@dataclass(frozen=True)
class _LogFile:
    descriptor: int
    inode: int
    size: int


def _start_of_last(data: bytes, lines: int) -> int:
    """Where the last ``lines`` lines begin that end in ``data``: those that begin there too."""
    at = len(data)
    for _ in range(lines + 1):
        at = data.rfind(b"\n", 0, at)
    return at + 1


def _size_of(entry: "os.DirEntry[str]") -> int | None:
    """None if it was renamed or removed since it was listed."""
    with suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_size
    return None


def _is_private(parts: tuple[str, ...]) -> bool:
    return any(fnmatchcase(part, pattern) for part in parts for pattern in _PRIVATE)


def _missing(what: str, why: str) -> InvalidJob:
    return InvalidJob([ConfigError(what[:200], why)])
