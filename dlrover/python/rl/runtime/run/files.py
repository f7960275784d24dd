# SPDX-License-Identifier: Apache-2.0
"""The files of a run's folder that clients may read, opened part by part, following no link; and the logs among them.

Ray redirects the output of a process to files on its node. A thread copies them line by line to
``<job_dir>/logs/rollout-1.log``, where they outlive the cluster: the process itself writes to a local file, which
neither blocks it nor fails with the job's disk. A killed process's last lines are copied by its successor, or by the
master when the job ends.
"""

import json
import os
import socket
import stat
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import log_line, redacted_bytes, valid_text
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId, hint
from dlrover.python.rl.common.private_files import open_below, open_folder
from dlrover.python.rl.runtime.checkpoint.runs import STATES
from dlrover.python.rl.runtime.run.machine import process_began
from dlrover.python.rl.runtime.run.names import LOGS, SUFFIX

RECORDS = "owner.*.json"  # pattern of the records of starts, see folder.py
KEPT_LOGS = 3  # log files of a process, the current one included
_CHUNK = 256 * 1024
_MAX_TAIL = 16 * 1024 * 1024
_MAX_FILES, _DEEPEST = 10_000, 50
_MAX_LINE = 64 * 1024
_MASTER = "master"
# Internal files: commits are large, the journal and the owner's record are no results.
_PRIVATE = (*STATES, "journal*.jsonl", RECORDS, "*.tmp", ".*")

MAX_BYTES = 16 * 1024 * 1024
_POLL_S = 0.25
_COPIED = 1024 * 1024


@dataclass(frozen=True)
class RunFile:
    path: str
    size: int


class RunFolder:
    """The files below an absolute folder, which is opened once and stays open; no part of its path may be a link.
    Raises InvalidJob if one is, and for a file that is missing, private, a link, or no plain file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _top(self) -> int:
        try:
            descriptor = open_folder(self._folder)
        except NotADirectoryError as error:
            why = "is no folder, or is behind a link that was added later: its files are not read"
            raise _missing(str(self._folder), why) from error
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def check(self) -> None:
        """Raise InvalidJob if the folder has become a link, or is below one; it may be missing."""
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
        """Open a descriptor of a plain file. No part may be a link, which could change after a check."""
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
        """Open like :meth:`open`; the caller closes it. Raises OSError and ValueError if there is no such file."""
        descriptor = open_below(self._top, parts)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise _missing("/".join(parts), "is no plain file")

    def processes(self) -> list[str]:
        return sorted(
            file.path.removeprefix(f"{LOGS}/").removesuffix(SUFFIX)
            for file in self._walk((LOGS,))
            if file.path.endswith(SUFFIX) and file.path.count("/") == 1
        )


class LogReader:
    """Reads new lines of one process or of all; ``tail`` limits the first reading to the last lines, and to 16 MB."""

    def __init__(self, folder: RunFolder, process: str = "", tail: int = 0) -> None:
        self._folder, self._process, self._tail = folder, process, tail
        self.positions: dict[str, tuple[int, int]] = {}  # inode and offset, by process

    def check(self, coming: Mapping[str, int] | None = None) -> None:
        """Raise InvalidJob if the process has no log, and is not ``coming`` (numbers of workers by role)."""
        names = self._folder.processes()
        if not self._process or self._process in names:
            return
        if coming is not None:
            names += [TRAINER_ID.log_name, _MASTER]
            names += [ProcessId(role, rank).log_name for role, num in coming.items() for rank in range(num)]
        if coming is None or self._process not in names:
            raise _missing(self._process, f"has no log{hint(self._process, names)}" if names else "has no log yet")

    def read(self) -> Iterator[tuple[str, str]]:
        """Yield the whole lines written since the last call, after the name of their process."""
        for name in [self._process] if self._process else self._folder.processes():
            while data := self._more(name):
                yield name, data.decode("utf-8", "replace")

    def _more(self, process: str) -> bytes:
        """Return the next whole lines of a process, from the older files first."""
        with ExitStack() as opened:
            files = self._files(process, opened)
            if files and process not in self.positions:
                self.positions[process] = self._begin(files)
            for at, (descriptor, state) in enumerate(files):
                inode, offset = self.positions[process]
                if state.st_ino != inode and any(newer.st_ino == inode for _, newer in files[at + 1 :]):
                    continue  # already read
                if state.st_ino != inode or state.st_size < offset:
                    offset = 0
                data = os.pread(descriptor, _CHUNK, offset)
                is_complete = at < len(files) - 1
                whole = data.rfind(b"\n") + 1
                if not whole and (is_complete or len(data) >= _MAX_LINE):
                    whole = len(data)
                self.positions[process] = state.st_ino, offset + whole
                if whole:
                    return data[:whole]
        return b""

    def _files(self, process: str, opened: ExitStack) -> list[tuple[int, os.stat_result]]:
        """Open the files, the oldest first. The newest is opened first, so that a rotation hides none."""
        files: dict[int, tuple[int, os.stat_result]] = {}
        for number in range(KEPT_LOGS):
            name = f"{process}{SUFFIX}" + (f".{number}" if number else "")
            with suppress(OSError, ValueError, InvalidJob):
                descriptor = self._folder.descriptor((LOGS, name))
                opened.callback(os.close, descriptor)
                state = os.fstat(descriptor)
                files[state.st_ino] = descriptor, state
        return list(files.values())[::-1]

    def _begin(self, files: list[tuple[int, os.stat_result]]) -> tuple[int, int]:
        """Return the position of the last ``tail`` lines, or of the beginning."""
        left, room = self._tail, _MAX_TAIL
        for descriptor, state in reversed(files if self._tail else ()):
            end = state.st_size
            while end:
                begin = max(end - _CHUNK, 0)
                data = os.pread(descriptor, end - begin, begin)
                room -= len(data)
                count = data.count(b"\n")
                if count > left or room < _CHUNK:
                    return state.st_ino, begin + _start_of_last(data, min(left, max(count - 1, 0)))
                left, end = left - count, begin
        return files[0][1].st_ino, 0


def _start_of_last(data: bytes, lines: int) -> int:
    """Return the position of the last ``lines`` whole lines in ``data``."""
    at = len(data)
    for _ in range(lines + 1):
        at = data.rfind(b"\n", 0, at)
    return at + 1


def _size_of(entry: "os.DirEntry[str]") -> int | None:
    """Return the size of a file; None if it was renamed or removed since it was listed."""
    with suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_size
    return None


def _is_private(parts: tuple[str, ...]) -> bool:
    return any(fnmatchcase(part, pattern) for part in parts for pattern in _PRIVATE)


def _missing(name: str, why: str) -> InvalidJob:
    return InvalidJob([ConfigError(name[:200], why)])


class LogCopier:
    """Copies new lines of ``sources``; while the target cannot be written, drops and counts them."""

    def __init__(self, folder: Path, process: str, sources: Iterable[Path], max_bytes: int = MAX_BYTES) -> None:
        self._process, self._max_bytes = process, max_bytes
        self._target = folder / LOGS / f"{process}{SUFFIX}"
        self._offsets = {str(source): _size(source) for source in sources}
        self._dropped = 0
        self._notes = deque[str]()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-copier", daemon=True)

    def start(self, title: str) -> None:
        copy_rest(self._target.parent, self._target.name.removesuffix(SUFFIX))
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        self._append(f"--- {title}, pid {os.getpid()} on {socket.gethostname()}, {now}\n".encode())
        _write_rest(self._target, self._offsets)
        self._thread.start()

    def note(self, line: str) -> None:
        """Add a log line at the next copy; returns at once."""
        self._notes.append(log_line(self._process, line))

    def stop(self) -> None:
        self._stopping.set()
        self.copy(is_last=True)

    def _run(self) -> None:
        while not self._stopping.wait(_POLL_S):
            self.copy()

    def copy(self, is_last: bool = False) -> None:
        with self._lock:
            while self._notes:
                self._append(self._notes.popleft().encode())
            before = dict(self._offsets)
            for source, offset in before.items():
                self._offsets[source] = self._copy_one(source, offset, is_last)
            if self._offsets != before:
                _write_rest(self._target, self._offsets)

    def _copy_one(self, source: str, offset: int, is_last: bool) -> int:
        """Return the offset up to which a source is copied: the end of its last whole line, at last its own end."""
        with suppress(OSError), open(source, "rb") as file:
            if os.fstat(file.fileno()).st_size < offset:
                offset = 0  # it was rotated
            file.seek(offset)
            while data := file.read(_COPIED):
                whole = data.rfind(b"\n") + 1 or (len(data) if is_last or len(data) == _COPIED else 0)
                if not whole:
                    break
                is_open = is_last and whole < _COPIED and data[whole - 1 : whole] != b"\n"
                self._append(data[:whole] + b"\n" * is_open)
                offset += whole
                file.seek(offset)
        return offset

    def _append(self, data: bytes) -> None:
        if self._dropped:
            data = f"--- {self._dropped} bytes could not be written\n".encode() + data
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            if _size(self._target) + len(data) > self._max_bytes:
                _rotate(self._target)
            with self._target.open("ab") as file:
                file.write(redacted_bytes(data))
            self._dropped = 0
        except OSError:
            self._dropped += len(data)


def copy_output(folder: Path, process: str, title: str) -> LogCopier | None:
    """Copy the standard output and error of this process; returns None if these are no files."""
    sources = set()
    for number in (1, 2):
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            sources |= {path} if path.is_absolute() and path.is_file() else set()
    if not sources:
        return None
    copier = LogCopier(folder, process, sorted(sources))
    copier.start(title)
    return copier


def copy_rest(logs: Path, process: str) -> None:
    """Copy the lines that a killed process of this machine had written but not copied."""
    target, note = logs / f"{process}{SUFFIX}", logs / f".{process}.json"
    try:
        record = json.loads(note.read_text(encoding="utf-8"))
        if record["host"] != socket.gethostname() or process_began(record["pid"]):
            return
        copier = LogCopier(logs.parent, process, ())
        for source, offset in record["offsets"].items():
            copier._copy_one(source, offset, is_last=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if target.exists():
        note.unlink(missing_ok=True)


def copy_all_rests(folder: Path) -> None:
    for note in (folder / LOGS).glob(".*.json"):
        copy_rest(folder / LOGS, note.name[1:].removesuffix(".json"))


def _write_rest(target: Path, offsets: Mapping[str, int]) -> None:
    note = target.parent / f".{target.name.removesuffix(SUFFIX)}.json"
    with suppress(OSError):
        note.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "offsets": offsets}))


def _rotate(target: Path) -> None:
    """Rename ``rollout-1.log`` to ``rollout-1.log.1``, and so on; the last file is removed."""
    for number in range(KEPT_LOGS - 1, 0, -1):
        older = target.with_name(f"{target.name}.{number}")
        newer = target.with_name(f"{target.name}.{number - 1}") if number > 1 else target
        with suppress(FileNotFoundError):
            newer.replace(older)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
