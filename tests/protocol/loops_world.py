# SPDX-License-Identifier: Apache-2.0
"""Several processes in one, each a separate event loop, on a clock that jumps to what happens next.

A process that is frozen takes no turn until it is thawed, while the clock runs, as for a stopped process. A
dead one takes none any more. What goes from one to another takes a time that the seed decides about.
"""

import asyncio
import heapq
import logging
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any


class Violation(AssertionError):
    """Something happened that must never happen."""


@contextmanager
def silence() -> Iterator[None]:
    """Let nothing be logged."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def simulated_disk() -> Iterator[Path]:
    """A folder in memory, where there is one, for the files of a simulated job."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(prefix="simulation-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class _NoWait(selectors.DefaultSelector):
    def select(self, timeout=None):
        return super().select(0)


class Process(asyncio.SelectorEventLoop):
    """The event loop of a process. Its code runs in :meth:`turn`."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name  # before it asks for the time
        super().__init__(_NoWait())
        self.thaws_s, self.is_dead = 0.0, False
        self.tasks: list[asyncio.Task[Any]] = []  # a dead process's are neither continued nor collected
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda loop, context: None)  # of tasks that end with their process

    def time(self) -> float:
        return self.world.now_s

    def next_s(self) -> float:
        """When it has something to do."""
        if self.is_dead:
            return inf
        waking = self.world.now_s if self._ready else self._scheduled[0].when() if self._scheduled else inf
        return max(waking, self.thaws_s)

    def turn(self) -> None:
        asyncio._set_running_loop(self)
        try:
            self._run_once()
        finally:
            asyncio._set_running_loop(None)

    def _make_task(self, loop: Any, work: Coroutine[Any, Any, Any], **options: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(work, loop=loop, **options)
        task._log_destroy_pending = False
        self.tasks.append(task)
        return task

    def call_soon(self, callback: Any, *arguments: Any, **options: Any) -> asyncio.Handle:
        if self.is_dead:
            return asyncio.Handle(callback, arguments, self)
        return super().call_soon(callback, *arguments, **options)

    def kill(self) -> None:
        self.is_dead = True
        for handle in self._ready:
            handle.cancel()  # it may be in the middle of a turn
        self._scheduled.clear()

    def close(self) -> None:
        """Close the tasks without what they would do at their end."""
        asyncio._set_running_loop(self)  # for what they begin in the end
        try:
            for task in self.tasks:
                with suppress(BaseException):
                    task.get_coro().close()
        finally:
            asyncio._set_running_loop(None)
        self.tasks.clear()
        super().close()


class World:
    """The clock, what is on its way, and all processes."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng, self.now_s = seed, Random(seed), 1000.0
        self.processes: list[Process] = []
        self.reached: Counter[str] = Counter()
        self.lines: list[str] = []
        self.slowness = 1.0
        self.broken: Violation | None = None
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def trace(self, *words: Any) -> None:
        self.lines.append(f"{self.now_s:9.3f} {' '.join(map(str, words))}")

    def start(self, name: str) -> Process:
        process = Process(self, name)
        self.processes.append(process)
        return process

    def latency_s(self) -> float:
        return self.rng.uniform(0.0002, 0.004) * self.slowness

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (self.now_s + delay_s, next(self._order), act))

    def run(self, until: Callable[[], bool], within_s: float) -> None:
        """Let everything happen. Raises Violation if ``until`` takes longer."""
        end_s = self.now_s + within_s
        while not until():
            if self.broken is not None:
                raise self.broken
            due = [(process.next_s(), self.rng.random(), process) for process in self.processes if not process.is_dead]
            when_s, _, process = min(due, default=(inf, 0.0, None))
            if self._coming and self._coming[0][0] <= when_s:
                self.now_s = max(self.now_s, self._coming[0][0])
                heapq.heappop(self._coming)[2]()
            elif when_s < inf:
                self.now_s = max(self.now_s, when_s)
                process.turn()
            else:
                raise Violation("nothing will ever happen")
            if self.now_s > end_s:
                raise Violation(f"it takes longer than {within_s:g} s")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.close()
        self.processes.clear()

    # -- between processes --------------------------------------------------------------------------------------------

    def answer_of(self, serve: Callable[["Reply"], None]) -> "asyncio.Future[Any]":
        """A future of the process whose turn it is; ``serve`` is called where the request arrives."""
        reply = Reply(self, asyncio.get_running_loop())
        self.after(self.latency_s(), lambda: serve(reply))
        return reply.future


class Reply:
    """The way back to who has asked."""

    def __init__(self, world: World, process: Any) -> None:
        self._world, self._process = world, process
        self.future: asyncio.Future[Any] = process.create_future()
        self.is_sent = False

    def value(self, value: Any) -> None:
        self._send(lambda: self.future.set_result(value))

    def error(self, error: BaseException) -> None:
        self._send(lambda: self.future.set_exception(error))

    def _send(self, settle: Callable[[], None]) -> None:
        if self.is_sent:
            return
        self.is_sent = True

        def arrive() -> None:
            if not self._process.is_dead and not self.future.done():
                self._process.call_soon(lambda: None if self.future.done() else settle())

        self._world.after(self._world.latency_s(), arrive)
