# SPDX-License-Identifier: Apache-2.0
"""The output of a job's processes in its folder, where it outlives the cluster: ``<job_dir>/logs/rollout-1.log``.

Ray sends what a process writes to files of its own on the process's node. A thread copies them on, line by line: the
process itself still writes to a local file, which neither blocks it nor fails with the job's disk. What a killed
process has written last is copied by its successor, or by the master when the job ends.
"""

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from dlrover.python.rl.common.redaction import redacted_bytes
from dlrover.python.rl.runtime.process.result_files import KEPT_LOGS, LOGS, SUFFIX

MAX_BYTES = 16 * 1024 * 1024
_POLL_S = 0.25
_CHUNK = 1024 * 1024


class LogCopier:
    """Copies what is appended to ``sources`` from now on. Where the target cannot be written, lines are dropped and
    counted."""

    def __init__(self, folder: Path, process: str, sources: Iterable[Path], max_bytes: int = MAX_BYTES) -> None:
        self._target, self._max_bytes = folder / LOGS / f"{process}{SUFFIX}", max_bytes
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
        """Add a line that no source has, with the time, at the next copy; returns at once."""
        self._notes.append(f"{datetime.now():%H:%M:%S} {line}\n")

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
        """The offset up to which a source is copied: the end of its last whole line, or of the source at last."""
        with suppress(OSError), open(source, "rb") as file:
            if os.fstat(file.fileno()).st_size < offset:
                offset = 0  # it was rotated
            file.seek(offset)
            while data := file.read(_CHUNK):
                whole = data.rfind(b"\n") + 1 or (len(data) if is_last or len(data) == _CHUNK else 0)
                if not whole:
                    break
                is_open = is_last and whole < _CHUNK and data[whole - 1 : whole] != b"\n"
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
    """Copy what this process writes to its standard output and error; None if these are no files."""
    sources = {path for number in (1, 2) if (path := _file_of(number)) is not None}
    if not sources:
        return None
    copier = LogCopier(folder, process, sorted(sources))
    copier.start(title)
    return copier


def copy_rest(logs: Path, process: str) -> None:
    """Copy what a process of this machine had written, but not copied, when it was killed."""
    target, note = logs / f"{process}{SUFFIX}", logs / f".{process}.json"
    try:
        rest = json.loads(note.read_text(encoding="utf-8"))
        if rest["host"] != socket.gethostname() or _is_alive(rest["pid"]):
            return
        copier = LogCopier(logs.parent, process, ())
        for source, offset in rest["offsets"].items():
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
    """``rollout-1.log`` becomes ``rollout-1.log.1``, and so on; the last one goes."""
    for number in range(KEPT_LOGS - 1, 0, -1):
        older = target.with_name(f"{target.name}.{number}")
        newer = target.with_name(f"{target.name}.{number - 1}") if number > 1 else target
        with suppress(FileNotFoundError):
            newer.replace(older)


def _file_of(number: int) -> Path | None:
    try:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
    except OSError:
        return None
    return path if path.is_absolute() and path.is_file() else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
