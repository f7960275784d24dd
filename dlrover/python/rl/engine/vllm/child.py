# SPDX-License-Identifier: Apache-2.0
"""vLLM in a separate process, which sees its engine's devices only.

``python -m dlrover.python.rl.engine.vllm.child FD`` answers calls over a socket. It leads a process group, which ends
with its owner, when standard input closes.
"""

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np

from dlrover.python.rl.common.errors import DLRoverRLError, EngineDied, EngineError
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.engine.api.weights import SnapshotFile, WeightSnapshot, tensor_bytes

if TYPE_CHECKING:
    from dlrover.python.rl.engine.vllm.runner import RestartingRunner, SleepingRunner

_ALIGN = 64


@dataclass(frozen=True)
class SharedWeights:
    """A snapshot without its bytes, which a file of another process of this node has."""

    outline: WeightSnapshot
    file: SnapshotFile
    factors: "SharedWeights | None" = None  # of the adapters, if any

    def open(self) -> WeightSnapshot:
        """Map the snapshot's bytes. While they are in use, the file is open with a shared lock, so that no sender of
        weights overwrites it."""
        descriptor = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            whole = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(whole, os.close, descriptor)
        starts, outline = self.file.starts, self.outline
        sizes = {name: tensor_bytes(outline.shapes[name], outline.dtypes[name]) for name in starts}
        buffers = {name: whole[start : start + sizes[name]] for name, start in starts.items()}
        adapters = outline.adapters
        if adapters is not None and self.factors is not None:
            adapters = replace(adapters, factors=self.factors.open())
        file = SnapshotFile(f"/proc/{os.getpid()}/fd/{descriptor}", starts)
        return replace(outline, buffers=buffers, adapters=adapters, file=file)


@contextmanager
def share_weights(weights: WeightSnapshot) -> Iterator[SharedWeights]:
    """Share a snapshot with other processes inside the block; bytes in no file are copied to one in memory."""
    weights = weights.on_host()
    outline = replace(weights, buffers={}, checked=False, file=None, lock_pages=None)
    if weights.adapters is not None:
        with share_weights(weights.adapters.factors) as factors, share_weights(replace(weights, adapters=None)) as base:
            adapters = replace(weights.adapters, factors=factors.outline)
            yield SharedWeights(replace(outline, adapters=adapters), base.file, factors)
        return
    if weights.file is not None:
        yield SharedWeights(outline, weights.file)
        return
    starts = {}
    with os.fdopen(os.memfd_create("weights"), "wb") as file:
        for name in weights.buffers:
            starts[name] = file.seek(-(-file.tell() // _ALIGN) * _ALIGN)
            file.write(weights.buffers[name].data)
        file.flush()
        yield SharedWeights(outline, SnapshotFile(f"/proc/{os.getpid()}/fd/{file.fileno()}", starts))


_MODULE = "dlrover.python.rl.engine.vllm.child"
_END_S = 10.0
_BEAT_S = 5.0
_SLOW_S = {"start": 3600.0, "load": 1800.0, "wake": 1800.0}
"""Calls that read or compile a model, and how long they count as progress."""


class ChildRunner:
    """Stands for the ``SleepingRunner`` (on a CPU ``RestartingRunner``) and its ``runner`` in a process with the
    environment ``env``. Raises their errors, libraries' as ``EngineError``, and ``EngineDied`` if the process ended."""

    def __init__(self, arguments: Mapping[str, Any], on_cpu: bool, env: Mapping[str, str]) -> None:
        self.has_weights = True
        self._connection, child_end = Pipe()
        self._calls = 0
        command = [sys.executable, "-m", _MODULE, str(child_end.fileno())]
        with child_end:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[child_end.fileno()], env=dict(env), start_new_session=True
            )
        try:
            self._call("start", dict(arguments), on_cpu)
        except BaseException:
            self.close()
            raise

    @property
    def runner(self) -> "ChildRunner":
        return self

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method that calls the runner there: ``submit``, ``step``, ``abort``, ``wake``, ``sleep``..."""
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method)

    def load(self, weights: WeightSnapshot) -> None:
        with share_weights(weights) as shared:
            self._call("load", shared)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self._calls += 1
        try:
            with self._whole_message():
                self._connection.send((self._calls, method, arguments, options))
            value, error = self._await_answer(time.monotonic() + _SLOW_S.get(method, 0.0))
        except (EOFError, OSError) as broken:
            self.close()
            raise EngineDied(f"vLLM's process has ended with status {self._process.returncode}") from broken
        if error is not None:
            raise error
        return value

    def _await_answer(self, until_s: float) -> tuple[Any, Exception | None]:
        """Return value and error of the last call, and drop answers to calls whose wait was interrupted."""
        answered, value, error = 0, None, None
        while answered != self._calls:
            while not self._connection.poll(_BEAT_S):
                if time.monotonic() < until_s:
                    note_progress()
            with self._whole_message():
                answered, value, error, self.has_weights = self._connection.recv()  # waits: no longer
        return value, error

    @contextmanager
    def _whole_message(self) -> Iterator[None]:
        """End the process if Ctrl-C leaves a part of a message in the connection."""
        try:
            yield
        except KeyboardInterrupt:
            self.close()
            raise

    def close(self) -> None:
        """End the process and its workers."""
        if self._process.returncode is not None:
            return  # another process may have its id by now
        self._connection.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_S)


def _portable(error: Exception) -> Exception:
    """Return errors of this package and of the system as they are, others as text: they may not be picklable."""
    if isinstance(error, DLRoverRLError | OSError):
        with suppress(Exception):
            ForkingPickler.dumps(error)
            return error
    return EngineError(f"{type(error).__name__}: {error}")


def serve(connection: Connection) -> None:
    """Answer calls until the owner has closed its side."""
    offloadable: Any = None
    while True:
        try:
            number, method, arguments, options = connection.recv()  # waits: for the owner, or its end
        except EOFError:
            return
        value: Any = None
        error: Exception | None = None
        try:
            if method == "start":
                offloadable = start_here(*arguments)
            elif method == "load":
                offloadable.load(arguments[0].open())
            else:
                target = offloadable if method in ("wake", "sleep") else offloadable.runner
                value = getattr(target, method)(*arguments, **options)
        except Exception as failure:  # noqa: BLE001 -- a process boundary: it is raised at the owner
            error = _portable(failure)
        connection.send((number, value, error, offloadable is not None and offloadable.has_weights))


def start_here(arguments: dict[str, Any], on_cpu: bool) -> "RestartingRunner | SleepingRunner":
    # Imported on demand: it imports vLLM, which takes seconds.
    from dlrover.python.rl.engine.vllm.runner import RestartingRunner, Runner, SleepingRunner

    return (RestartingRunner if on_cpu else SleepingRunner)(partial(Runner, arguments))


def _end_with_owner() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_owner, daemon=True).start()
    serve(Connection(int(sys.argv[1])))
