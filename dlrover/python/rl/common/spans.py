# SPDX-License-Identifier: Apache-2.0
"""The spans of a run: the calls, waits and steps of each process, in ``spans/<process>.jsonl`` of the run's folder.

Each line is a JSON array whose first item is its kind; times are Unix seconds::

    ["process", "ROLLOUT[1]", attempt, pid, host, at_s]            at the start, and first in each file
    ["call", step, n, method, began_s, ended_s, {phase: seconds} | null, error's class | ""]
    ["issue", step, n, role, [ranks], method, at_s, ["ROLE.method", ...]]   by the trainer; last, the arguments' sources
    ["wait", role, method, began_s, ended_s]                                by the trainer
    ["step", step, began_s, ended_s]                                        by the trainer: one attempt
    ["dropped", lines]                                             number of lines that could not be written

Step and n are -1 for a call that belongs to no step. A "step" of -1 is the time after the last one: its calls have the
number of the step that would have followed."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from dlrover.python.rl.common.disk_space import DiskWait, append
from dlrover.python.rl.common.names import ProcessId

SPANS, SUFFIX, OLDER = "spans", ".jsonl", ".jsonl.1"
NO_STEP = -1

_FLUSH_S = 2.0
_MOST_LINES = 10_000  # in memory, while the disk does not answer
_MB = 1_000_000
_AT_ONCE = DiskWait(0.0, 0.0, 0.0)
_ENCODER = msgspec.json.Encoder(enc_hook=str.__str__)  # of subclasses, as roles are


class SpanFile:
    """Writes the spans of one process, at most ``most_mb`` MB in two files; 0: none. A thread writes them two seconds
    later, so that the disk neither delays nor fails a call. Thread safe."""

    def __init__(self, folder: Path, process: ProcessId, attempt: int, most_mb: int) -> None:
        self._path = folder / SPANS / f"{process.log_name}{SUFFIX}"
        self._title = "process", str(process), attempt, os.getpid(), socket.gethostname(), time.time()
        self._most_bytes = most_mb * _MB // 2
        self._lines: list[tuple[Any, ...]] = []
        self._dropped = 0
        self._is_begun = False
        self._has_thread = False
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def add_call(
        self, call_id: tuple[int, int], method: str, seconds: float, phases: dict[str, float], error: str
    ) -> None:
        """Add a call that has just ended after ``seconds``."""
        now_s, rounded = time.time(), {name: round(each, 6) for name, each in phases.items()}
        self.add("call", *call_id, method, now_s - seconds, now_s, rounded or None, error)

    def flush(self) -> None:
        """Write all lines now; drop and count them if the disk does not take them."""
        with self._writing:
            with self._lock:
                lines, self._lines = self._lines, []
                dropped, self._dropped = self._dropped, 0
            try:
                if lines:
                    self._write(_encode([("dropped", dropped), *lines] if dropped else lines))
            except OSError:
                with self._lock:
                    self._dropped += dropped + len(lines)

    def add(self, *line: Any) -> None:
        """Add a line of the kind ``line[0]``."""
        if not self._most_bytes:
            return
        with self._lock:
            if len(self._lines) >= _MOST_LINES:
                self._dropped += 1
                return
            self._lines.append(line)
            if not self._has_thread:
                with suppress(RuntimeError):  # no thread can start: the interpreter is ending, or threads have run out
                    threading.Thread(target=self._flush_often, name="spans", daemon=True).start()
                    self._has_thread = True

    def _flush_often(self) -> None:
        """Write the lines every two seconds, until there are none."""
        while True:
            time.sleep(_FLUSH_S)
            with self._lock:
                self._has_thread = bool(self._lines)
            if not self._has_thread:
                return
            self.flush()

    def _write(self, data: bytes) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size and size + len(data) > self._most_bytes:
            self._path.replace(self._path.with_name(self._path.name.removesuffix(SUFFIX) + OLDER))
            size = 0
        if not size or not self._is_begun:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            data = b"\n" * (size > 0) + _encode([self._title]) + data  # a killed process may have left half a line
        if len(data) > self._most_bytes:
            raise OSError(f"{len(data)} bytes are more than the file may have")
        append(self._path, data, _AT_ONCE)
        self._is_begun = True


def _encode(lines: list[tuple[Any, ...]]) -> bytes:
    return _ENCODER.encode_lines(lines)


class _Phases:
    """The seconds of a call by phase, excluding the phases nested in each; and the phase that is open now."""

    __slots__ = ("open", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.open = ""


_call: ContextVar[_Phases | None] = ContextVar("phases of the current call", default=None)


@contextmanager
def record_phases() -> Iterator[dict[str, float]]:
    """Record each :func:`phase` inside the block."""
    call = _Phases()
    token = _call.set(call)
    try:
        yield call.seconds
    finally:
        _call.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the time of the block to a phase of the current call; outside of calls, do nothing. Only the host's
    time counts: the work of an accelerator, which runs later, is in the phase in which the host waits for it."""
    call = _call.get()
    if call is None:
        yield
        return
    outer, call.open, began_s = call.open, name, time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - began_s
        call.open = outer
        call.seconds[name] = call.seconds.get(name, 0.0) + seconds
        if outer:
            call.seconds[outer] = call.seconds.get(outer, 0.0) - seconds
