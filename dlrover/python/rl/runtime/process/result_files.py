# SPDX-License-Identifier: Apache-2.0
"""The files of a run's folder that clients may read: opened part by part, following no link."""

import os
import stat
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import hint

LOGS = "logs"
SUFFIX = ".log"
_CHUNK = 256 * 1024
_MAX_FILES = 10_000
_MAX_LINE = 64 * 1024
# The system's own files: commits are large and internal, the journal and the owner's record are no results.
_PRIVATE = ("commits", "checkpoints", "journal*.jsonl", "owner.*.json", "*.tmp", ".*")


@dataclass(frozen=True)
class RunFile:
    path: str
    size: int


class RunFolder:
    """Raises InvalidJob when a file is missing, private, a link, or no plain file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list_files(self) -> list[RunFile]:
        return [file for file, _ in zip(self._walk((), self._folder), range(_MAX_FILES), strict=False)]

    def _walk(self, parts: tuple[str, ...], folder: Path) -> Iterator[RunFile]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                inner = (*parts, entry.name)
                if _is_private(inner) or entry.is_symlink():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(inner, Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    yield RunFile("/".join(inner), entry.stat(follow_symlinks=False).st_size)

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
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        opened: list[int] = []
        try:
            opened.append(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for part in parts[:-1]:
                opened.append(os.open(part, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
            opened.append(os.open(parts[-1], flags, dir_fd=opened[-1]))
            if not stat.S_ISREG(os.fstat(opened[-1]).st_mode):
                raise _missing("/".join(parts), "is no plain file")
            yield opened[-1]
        except (OSError, ValueError) as error:
            near = hint("/".join(parts), [file.path for file in self.list_files()])
            raise _missing("/".join(parts), f"no such file{near}") from error
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def processes(self) -> list[str]:
        """The processes that have a log."""
        return sorted(
            file.path.removeprefix(f"{LOGS}/").removesuffix(SUFFIX)
            for file in self._walk((LOGS,), self._folder / LOGS)
            if file.path.endswith(SUFFIX) and file.path.count("/") == 1
        )


class LogReader:
    """Reads what one process has written, or all of them, on from where it was; ``tail`` limits the first reading to
    the last lines of each. Raises InvalidJob if ``process`` has no log."""

    def __init__(self, folder: RunFolder, process: str = "", tail: int = 0) -> None:
        self._folder, self._process, self._tail = folder, process, tail
        self._positions: dict[str, _LogPosition] = {}

    def check(self) -> None:
        known = self._folder.processes()
        if self._process and self._process not in known:
            raise _missing(self._process, f"has no log{hint(self._process, known)}" if known else "has no log yet")

    def read(self) -> Iterator[tuple[str, str]]:
        """Whole lines that were written since, with the process that wrote them."""
        for name in [self._process] if self._process else self._folder.processes():
            position = self._positions.get(name)
            if position is None:
                position = self._positions[name] = _LogPosition()
                if self._tail and (text := self._last_lines(name, position)):
                    yield name, text
            while text := self._more(name, position):
                yield name, text

    def _last_lines(self, process: str, position: "_LogPosition") -> str:
        lines: deque[str] = deque(maxlen=self._tail)
        while text := self._more(process, position):
            lines.extend(text.splitlines(keepends=True))
        return "".join(lines)

    def _more(self, process: str, position: "_LogPosition") -> str:
        """The next whole lines after ``position``, which goes on; after a rotation from the new file's beginning."""
        try:
            with self._folder.open((LOGS, f"{process}{SUFFIX}")) as descriptor:
                state = os.fstat(descriptor)
                if state.st_ino != position.inode or state.st_size < position.offset:
                    position.inode, position.offset = state.st_ino, 0
                data = os.pread(descriptor, _CHUNK, position.offset)
        except InvalidJob:
            return ""
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= _MAX_LINE:
            whole = len(data)
        position.offset += whole
        return data[:whole].decode("utf-8", "replace")


@dataclass
class _LogPosition:
    inode: int = 0
    offset: int = 0


def _is_private(parts: tuple[str, ...]) -> bool:
    return any(fnmatchcase(part, pattern) for part in parts for pattern in _PRIVATE)


def _missing(what: str, why: str) -> InvalidJob:
    return InvalidJob([ConfigError(what[:200], why)])
