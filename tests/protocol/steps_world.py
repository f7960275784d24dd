# SPDX-License-Identifier: Apache-2.0
"""Several processes in one: threads of which one runs at a time, on a clock and a disk that a seed decides about.

A thread hands over only inside :meth:`World.operation`: at calls between processes, at operations on the disk, and when
it sleeps. So a seed is the same run every time.
"""

import builtins
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any
from unittest import mock

from tests.protocol.loops_world import Violation

ON_DISK = ("mkdir", "rename", "replace", "unlink", "fsync", "open", "rmdir")
"""Functions of ``os`` that are operations on the disk."""

_PATIENCE_S = 30.0  # of the real clock, for a thread that does not hand over


class Killed(BaseException):
    """The thread's process is gone."""


def _taken_lock() -> threading.Lock:
    """A lock that another thread releases, the interpreter's, since threads hand over thousands of times."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Process:
    """A process, whose main function runs in a separate thread."""

    def __init__(self, world: "World", name: str, main: Callable[[], None]) -> None:
        self.world, self.name, self._main = world, name, main
        self.turn = _taken_lock()
        self.wake_s = world.now_s
        self.is_dead = self.is_done = False
        self.error: BaseException | None = None
        self.locks: set[int] = set()
        self.waits_for: Callable[[], bool] | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.is_dead:
                self._main()
        except BaseException as error:  # noqa: BLE001 -- the world looks at it
            self.error = error
        self.is_done = True
        self.world.back.release()

    @property
    def can_run(self) -> bool:
        if self.is_dead or self.is_done or self.wake_s > self.world.now_s:
            return False
        return self.waits_for is None or self.waits_for()

    def kill(self) -> None:
        """It does nothing any more, and the kernel gives its locks back."""
        self.is_dead = True
        for handle in self.locks:
            with suppress(OSError):
                _REAL["close"](handle)
        self.locks.clear()


class World:
    """Runs processes in an order that ``seed`` decides."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng, self.now_s = seed, Random(seed), 1000.0
        self.processes: list[Process] = []
        self.back = _taken_lock()
        self.current: Process | None = None
        self.reached: Counter[str] = Counter()
        self.lines: list[str] = []
        self.operations = 0
        self.strikes = False
        self.disturb: Callable[[str], None] = lambda operation: None

    def start(self, name: str, main: Callable[[], None]) -> Process:
        process = Process(self, name, main)
        self.processes.append(process)
        return process

    def trace(self, *words: Any) -> None:
        self.lines.append(f"{self.now_s:.3f} {self.current.name if self.current else '-'} {' '.join(map(str, words))}")

    def run(self, until: Callable[[], bool], within_s: float) -> None:
        """Let the processes run. Raises Violation if that takes longer."""
        end_s = self.now_s + within_s
        while not until():
            ready = [process for process in self.processes if process.can_run]
            if not ready:
                sleeping = [p.wake_s for p in self.processes if not p.is_dead and not p.is_done and p.waits_for is None]
                if not sleeping or min(sleeping) > end_s:
                    raise Violation(f"nothing happens within {within_s:g} s")
                self.now_s = max(self.now_s, min(sleeping))
                continue
            self.current = process = ready[0] if len(ready) == 1 else self.rng.choice(ready)
            process.turn.release()
            if not self.back.acquire(timeout=_PATIENCE_S):
                raise Violation(f"{process.name} does not hand over")
            self.current = None

    def close(self) -> None:
        """End all threads."""
        for process in self.processes:
            process.kill()
            while not process.is_done:
                self.current = process
                process.turn.release()
                if not self.back.acquire(timeout=_PATIENCE_S):
                    raise Violation(f"{process.name} does not end")
        self.current = None

    # -- in a process -------------------------------------------------------------------------------------------------

    def is_in_process(self) -> bool:
        """Return True if this is a process of the world, and not a fault that strikes it."""
        if self.strikes or self.current is None:
            return False
        return threading.current_thread() is self.current.thread

    def operation(self, operation: str) -> None:
        """Something is about to happen: another process may continue, or a fault strikes."""
        process = self.current
        assert process is not None
        if process.is_dead:
            raise Killed
        self.operations += 1
        self.now_s += 0.0005
        self.disturb(operation)
        if process.is_dead or (len(self.processes) > 1 and self.rng.random() < 0.3):
            self.hand_over()

    def hand_over(self) -> None:
        process = self.current
        assert process is not None
        self.back.release()
        process.turn.acquire()
        if process.is_dead:
            raise Killed

    def sleep(self, seconds: float) -> None:
        assert self.current is not None
        self.current.wake_s = self.now_s + seconds
        self.hand_over()

    def wait(self, condition: Callable[[], bool]) -> None:
        process = self.current
        assert process is not None
        process.waits_for = condition
        self.hand_over()
        process.waits_for = None


_REAL: dict[str, Any] = {name: getattr(os, name) for name in (*ON_DISK, "close")}
_REAL |= {"sleep": time.sleep, "monotonic": time.monotonic, "builtins.open": builtins.open}


class CopyThread:
    """The part of ``threading.Thread`` that a copy in the background needs: a process of the world."""

    world: World | None = None

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target, self._name = target, name
        self._process: Process | None = None

    def start(self) -> None:
        assert self.world is not None
        self._process = self.world.start(self._name, self._target)

    def is_alive(self) -> bool:
        return self._process is not None and not self._process.is_done and not self._process.is_dead

    def join(self) -> None:
        assert self.world is not None
        self.world.wait(lambda: not self.is_alive())


class Substitutes:
    """Replacements of functions of the clock and the disk: the world's in its processes, themselves elsewhere."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_disk(self, name: str) -> Callable[..., Any]:
        world, real = self.world, _REAL[name]

        def operation(*args: Any, **kwargs: Any) -> Any:
            if not world.is_in_process():
                return real(*args, **kwargs)
            world.operation(f"disk {name}")
            result = real(*args, **kwargs)
            if name == "open" and world.current is not None and str(args[0]).endswith("LOCK"):
                world.current.locks.add(result)  # which the kernel gives back when the process dies
            return result

        return operation

    def close(self, handle: int) -> None:
        process = self.world.current
        if process is not None and self.world.is_in_process():
            if process.is_dead:
                return
            process.locks.discard(handle)
        _REAL["close"](handle)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self.world.is_in_process():
            self.world.operation("disk write" if set(mode) & set("wxa+") else "disk read")
        return _REAL["builtins.open"](path, mode, *args, **kwargs)

    def sleep(self, seconds: float) -> None:
        (self.world.sleep if self.world.is_in_process() else _REAL["sleep"])(seconds)

    def monotonic(self) -> float:
        return self.world.now_s if self.world.is_in_process() else _REAL["monotonic"]()


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """The clock and the disk of this process are the world's for its processes."""
    ours = Substitutes(world)
    places: list[tuple[Any, str, Any]] = [(os, name, ours.on_disk(name)) for name in ON_DISK]
    places += [(os, "close", ours.close), (builtins, "open", ours.open)]
    places += [(time, "sleep", ours.sleep), (time, "monotonic", ours.monotonic)]
    CopyThread.world = world
    with ExitStack() as stack:
        stack.callback(world.close)
        for where, name, function in places:
            stack.enter_context(mock.patch.object(where, name, function))
        yield
