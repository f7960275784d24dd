"""Where the master's journal is kept: append-only lines, in a file or in memory."""

import os
from pathlib import Path
from typing import Protocol

from dlrover.python.rl.common.errors import JournalCorrupt


class StateStore(Protocol):
    """An append-only list of lines."""

    def append(self, line: bytes) -> None:
        """Add a line; when this returns, it is there for good."""
        ...

    def read(self) -> list[bytes]:
        """All lines, oldest first."""
        ...

    def close(self) -> None:
        """Give back what the store holds open. May be called twice."""
        ...


class MemoryStateStore:
    """Lines in memory, gone with the process."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def append(self, line: bytes) -> None:
        self._lines.append(line)

    def read(self) -> list[bytes]:
        return list(self._lines)

    def close(self) -> None:
        pass


class FileStateStore:
    """Lines in a file, each synced to disk before :meth:`append` returns.

    A last line without its newline was cut short by a crash before it counted: it is dropped. Anything else that is
    wrong is for the reader's checksums to find.

    Raises:
        JournalCorrupt: the file exists and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise JournalCorrupt(f"the journal {path} cannot be read: {error}") from error
        whole = content[: content.rfind(b"\n") + 1]
        self._lines = whole.splitlines()
        self._file = open(path, "ab")  # noqa: SIM115 -- held open until close()
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        _sync_folder(path.parent)

    def append(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._lines.append(line)

    def read(self) -> list[bytes]:
        return list(self._lines)

    def close(self) -> None:
        self._file.close()


def _sync_folder(folder: Path) -> None:
    """Make the file's name itself durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
