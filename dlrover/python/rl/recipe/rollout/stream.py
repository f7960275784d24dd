# SPDX-License-Identifier: Apache-2.0
"""A rollout engine shared by many coroutines, each of which waits for its own completion; and their event loops.

::

    submit ---> waiting ---_hand_over---> running --advance--> result
                  ^                          |
                  '---------preempt----------'   (new weights, or priority requests; it resumes where it stopped)
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import BaseRolloutEngine, Completion, Request, SamplingParams
from dlrover.python.rl.engine.model.ranks import use_device
from dlrover.python.rl.recipe.base.engine_workload import use_threads

T = TypeVar("T")

_JOIN_S, _CANCEL_S = 10.0, 1.0


class InlineLoop:
    """Runs in the caller's thread, within calls only. Unfinished tasks continue in the next call."""

    runs_between_calls = False

    def __init__(self) -> None:
        self._loop = _PausableLoop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(coroutine)
        pool = ThreadPoolExecutor(1, "rollouts")  # A notebook's cell has a running loop; a thread has one at most.
        try:
            return pool.submit(self._loop.run_until_complete, coroutine).result()  # waits: the trainer bounds the call
        finally:
            pool.shutdown(wait=False)

    def close(self) -> None:
        self.run(_cancel_all())
        self._loop.close()


class ThreadLoop:
    """Runs in a background thread, also between calls, with its own ``threads`` of torch and current ``device``."""

    runs_between_calls = True

    def __init__(self, threads: int | None = None, device: str = "cpu") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(threads, device), name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()  # waits: the trainer bounds the call

    def close(self) -> None:
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _serve(self, threads: int | None, device: str) -> None:
        use_threads(threads)
        use_device(device)
        self._loop.run_forever()


class _PausableLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stops between calls, so that no timeout expires there."""

    def __init__(self) -> None:
        self._paused_s = 0.0
        self._paused_at: float | None = None
        super().__init__()

    def time(self) -> float:
        return (super().time() if self._paused_at is None else self._paused_at) - self._paused_s

    def run_forever(self) -> None:
        if self._paused_at is not None:
            self._paused_s += super().time() - self._paused_at
            self._paused_at = None
        try:
            super().run_forever()
        finally:
            self._paused_at = super().time()

    def __del__(self) -> None:  # no ResourceWarning for a workload that was not closed
        if not self.is_closed():
            self.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_S)


class Wakeup:
    """Wakes all coroutines that wait at that moment. (``asyncio.Event`` keeps its state and has no timeout.)"""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait({waiter}, timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)


@dataclass(eq=False)
class PendingRequest:
    request: Request  # with its tokens when the engine last returned it
    sampling: SamplingParams
    seed: tuple[int, ...]
    priority: bool
    result: "asyncio.Future[Completion]"
    added_at: int | None = None  # the stream's step count when the engine took it


@dataclass(eq=False)
class EngineStream:
    """Many requests to one engine without other users; ``wakeup`` is notified of new requests."""

    engine: BaseRolloutEngine
    wakeup: Wakeup
    _waiting: list[PendingRequest] = field(default_factory=list)
    _running: dict[tuple[int, int], PendingRequest] = field(default_factory=dict)
    is_exclusive: bool = False
    _steps: int = 0

    def submit(
        self, request: Request, sampling: SamplingParams, seed: tuple[int, ...], priority: bool = False
    ) -> PendingRequest:
        pending = PendingRequest(request, sampling, seed, priority, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        self.wakeup.notify()
        return pending

    async def wait(self, pending: PendingRequest) -> Completion:
        """Wait for a completion; cancelling withdraws the request. Raises EngineError if the engine refuses it."""
        try:
            return await pending.result
        finally:
            key = pending.request.key
            if self._running.get(key) is pending:
                del self._running[key]
                self.engine.abort([key])
            elif pending in self._waiting:
                self._waiting.remove(pending)

    def step(self) -> bool:
        """Advance the engine; return False if there is nothing to generate. Requests survive an EngineError."""
        if self.engine.version < 0:
            return False
        self._hand_over()
        if not self._running:
            return False
        completions = self.engine.advance()
        self._steps += 1
        for completion in completions:
            pending = self._running.pop(completion.request.key)
            if not pending.result.done():
                pending.result.set_result(completion)
        return True

    def preempt(self) -> None:
        """Take all requests back from the engine with their tokens; the next step hands them over again."""
        preempted = []
        for completion in self.engine.abort():
            pending = self._running.pop(completion.request.key)
            pending.request, pending.added_at = completion.request, None
            preempted.append(pending)
        self._waiting[:0] = preempted

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self.preempt()
        self.is_exclusive = True
        try:
            yield
        finally:
            self.is_exclusive = False
            self.wakeup.notify()

    def version_range(self, pending: PendingRequest) -> tuple[int, int]:
        """Return the lowest and highest weight version that may have generated a token of a request; -1 for none.
        Weights change only while the engine has no request, so running requests have the served version."""
        versions = pending.request.versions
        newest = self.engine.version if pending.added_at is not None and self._steps > pending.added_at else -1
        if len(versions) == 0:
            return newest, newest
        return int(versions.min()), max(newest, int(versions.max()))

    def _hand_over(self) -> None:
        """Add waiting requests to the engine, except those whose key is already running."""
        if not self._waiting:
            return
        batches: dict[tuple[SamplingParams, tuple[int, ...]], list[PendingRequest]] = {}
        waiting, keys = [], set(self._running)
        for pending in self._waiting:
            if pending.request.key in keys or (self.is_exclusive and not pending.priority):
                waiting.append(pending)
            else:
                keys.add(pending.request.key)
                batches.setdefault((pending.sampling, pending.seed), []).append(pending)
        self._waiting = waiting
        for batch in batches.values():
            self._add(batch)

    def _add(self, batch: Sequence[PendingRequest]) -> None:
        first = batch[0]
        try:
            self.engine.add([pending.request for pending in batch], first.sampling, first.seed)
        except EngineError as error:
            if len(batch) > 1:
                for pending in batch:
                    self._add([pending])
            elif not first.result.done():
                first.result.set_exception(error)
            return
        for pending in batch:
            pending.added_at = self._steps
            self._running[pending.request.key] = pending
