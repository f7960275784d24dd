# SPDX-License-Identifier: Apache-2.0
"""The store of the master's journal: append-only lines, in a file or in memory.

The file, one line each::

    rl-journal 1 owner=0000000002 lines=000000000041 1f0c22aa     current owner; number of lines safe on disk; crc32
    <line> 5d3aa810                                               each ends with the crc32 of all lines up to itself

Lines that were changed, lost, repeated or exchanged are detected anywhere in the file. Only the loss of the last ones,
which were appended together, is not, if their writer crashed before the next ones: they look like lines that a crash
cut short, and such lines were never acted upon.
"""

import fcntl
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from dlrover.python.rl.common.disk_space import is_transient
from dlrover.python.rl.common.errors import JournalCorrupt, StaleEpoch
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.private_files import open_file
from dlrover.python.rl.runtime.checkpoint.state_file import new_file, sync_folder
from dlrover.python.rl.runtime.checkpoint.store import TAKE_OVER_S, take_lock

_LOG = get_logger(__name__)


class StateStore:
    """An append-only list of lines, in memory."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def append(self, *lines: bytes) -> None:
        """Add lines, which are stored when this returns, and absent when it raises."""
        self._lines += lines

    def read(self) -> list[bytes]:
        return list(self._lines)

    def check(self) -> None:
        """Raise as :meth:`append` would, for any reason but the disk."""

    def close(self) -> None:
        """Release the store; may be called twice."""


class FileStateStore(StateStore):
    """Lines in a file, each synced to disk before :meth:`append` returns. Not thread safe.

    Opening takes the file over: another process that has it open can no longer append. A last line that a crash cut
    short is dropped, unless it only lacks its newline. A missing file is created unless it ``must_exist``. Raises
    JournalCorrupt for an unreadable, changed or missing file, OSError if it cannot be created or taken over.
    """

    def __init__(self, path: Path, must_exist: bool = False) -> None:
        if must_exist and not path.exists():
            raise JournalCorrupt(f"the journal {path} is not there")
        if not path.exists():
            _create(path)
        # Its creator may have died before the name was durable: the lines would be lost with the name.
        sync_folder(path.parent)
        self._path, self._suspect = path, False
        try:
            self._file = os.open(path, os.O_RDWR)
        except OSError as error:
            if is_transient(error):
                raise
            raise JournalCorrupt(f"the journal {path} cannot be read: {error}") from error
        try:
            self._replace_if_frozen()
            with self._locked():
                journal = _parse(path, _content(path, can_retry=True))
                self._owner, self._lines = journal.owner + 1, journal.lines
                self._chain, self._end = journal.chain, journal.end
                self._header = _header(self._owner, len(self._lines))
                if journal.repair:
                    _write(self._file, journal.repair, journal.end - len(journal.repair))
                os.ftruncate(self._file, journal.end)
                os.fsync(self._file)  # the lines are safe before the header says so
                _write(self._file, self._header, 0)
                os.fsync(self._file)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, *lines: bytes) -> None:
        """Add lines, without their newlines, in one write.

        Raises:
            StaleEpoch: another process has taken the journal over.
            JournalCorrupt: another process has changed the file, or an earlier line is not on the disk.
            OSError: the disk is full, or failed. The next call reopens the file, and removes partial lines.
        """
        records, chain = b"", self._chain
        for line in lines:
            if b"\n" in line:
                raise ValueError("a line of the journal holds a newline")
            record, chain = _record(line, chain)
            records += record
        header = _header(self._owner, len(self._lines))
        try:
            if self._suspect:
                self._reopen()
            with self._locked():
                self.check()
                try:
                    _write(self._file, records, self._end)
                    _write(self._file, header, 0)
                    os.fsync(self._file)
                except OSError:
                    self._undo()
                    raise
        except OSError:
            self._suspect = True
            raise
        self._lines += lines
        self._header, self._chain, self._end = header, chain, self._end + len(records)

    def close(self) -> None:
        if self._file < 0:
            return
        with suppress(OSError, JournalCorrupt, StaleEpoch), self._locked():
            self.check()
            _write(self._file, _header(self._owner, len(self._lines)), 0)
        with suppress(OSError):  # a network file system may be away
            os.close(self._file)
        self._file = -1

    def _replace_if_frozen(self) -> None:
        """Use a copy of the file if its owner is frozen in an append; when it resumes, it finds the file removed."""
        try:
            take_lock(self._file, self._path, TAKE_OVER_S)
            fcntl.flock(self._file, fcntl.LOCK_UN)
        except TimeoutError as error:
            _LOG.warning("taking %s over without its lock: %s", self._path, error)
            with new_file(self._path, durable=True) as copy:
                copy.write(_content(self._path, can_retry=True))
            os.close(self._file)
            self._file = os.open(self._path, os.O_RDWR)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        take_lock(self._file, self._path)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def check(self) -> None:
        header, status = os.pread(self._file, len(self._header), 0), os.fstat(self._file)
        # Another master has this file, or a copy of it at its path.
        current = header
        with suppress(FileNotFoundError):
            current = header if status.st_nlink else self._path.read_bytes()[: len(self._header)]
        match = _HEADER.fullmatch(current)
        if match and int(match["owner"]) > self._owner:
            raise StaleEpoch(f"another master has taken over the journal {self._path}")
        if header != self._header or status.st_size != self._end or status.st_nlink == 0:
            raise JournalCorrupt(f"another process has changed or removed the journal {self._path}")

    def _undo(self) -> None:
        os.ftruncate(self._file, self._end)
        _write(self._file, self._header, 0)
        os.fsync(self._file)

    def _reopen(self) -> None:
        """Reopen the file after an error, since the disk may have lost it, or the last write: compare the lines that
        were appended, and remove everything behind them. Raises as :meth:`append`."""
        file = os.open(self._path, os.O_RDWR)
        with suppress(OSError):
            os.close(self._file)
        self._file = file
        with self._locked():
            content = self._path.read_bytes()
            match = _HEADER.match(content)
            if match and int(match["owner"]) > self._owner:
                raise StaleEpoch(f"another master has taken over the journal {self._path}")
            if _parse(self._path, content[: self._end]).lines != self._lines:
                raise JournalCorrupt(f"another process has changed or removed the journal {self._path}")
            self._undo()
        self._suspect = False


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a journal that may be in use, without taking it over. Raises JournalCorrupt."""
    return _parse(path, _content(path)).lines


_HEADER = re.compile(rb"(?P<text>rl-journal 1 owner=(?P<owner>\d{10}) lines=(?P<lines>\d{12})) (?P<crc>[0-9a-f]{8})\n")
_SEED = zlib.crc32(b"rl-journal 1")
_CRC_SIZE = 9


@dataclass(frozen=True)
class _Journal:
    """A parsed journal: the offset of its next line is ``end``; ``repair`` are the lines before it that may only be in
    the system's memory, since the system treats them as synced after a failed sync."""

    owner: int
    lines: list[bytes]
    chain: int
    end: int
    repair: bytes = b""


def _header(owner: int, lines: int) -> bytes:
    text = b"rl-journal 1 owner=%010d lines=%012d" % (owner, lines)
    return b"%s %08x\n" % (text, zlib.crc32(text))


def _record(line: bytes, chain: int) -> tuple[bytes, int]:
    chain = zlib.crc32(line + b"\n", chain)
    return b"%s %08x\n" % (line, chain), chain


def _parse(path: Path, content: bytes) -> _Journal:
    match = _HEADER.match(content)
    if not match or zlib.crc32(match["text"]) != int(match["crc"], 16):
        raise JournalCorrupt(f"{path} is no journal: it begins with {content[:60]!r}")
    lines, chain, end, repair, safe = [], _SEED, match.end(), b"", int(match["lines"])
    *records, tail = content[end:].split(b"\n")
    for number, text in enumerate(records, 2):
        line = text[:-_CRC_SIZE]
        record, chain = _record(line, chain)
        if record[:-1] != text:
            raise JournalCorrupt(f"journal line {number} does not match its checksum ({path})")
        lines.append(line)
        end += len(record)
        repair += record if len(lines) > safe else b""
    is_whole = False
    for text in (tail, tail[:-1]):  # only the newline is missing, or something else is in its place
        record, after = _record(text[:-_CRC_SIZE], chain)
        if text and record[:-1] == text:
            lines, chain, end, repair = [*lines, text[:-_CRC_SIZE]], after, end + len(record), repair + record
            is_whole = True
            break
    if tail:
        _LOG.warning("the last line of %s is incomplete: %s", path, "repaired" if is_whole else "dropped")
    if len(lines) < safe:
        raise JournalCorrupt(f"the journal {path} has {len(lines)} lines left of {safe}")
    return _Journal(int(match["owner"]), lines, chain, end, repair)


def _content(path: Path, can_retry: bool = False) -> bytes:
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        if can_retry and is_transient(error):
            raise
        raise JournalCorrupt(f"the journal {path} cannot be read: {error}") from error


def _write(file: int, content: bytes, at: int) -> None:
    while content:
        count = os.pwrite(file, content, at)
        content, at = content[count:], at + count


def _create(path: Path) -> None:
    """Create an empty journal, named once its header is durable; one that another process has created stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            os.fchmod(file.fileno(), 0o600)  # the last log lines of a process may hold anything
            file.write(_header(0, 0))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
