# SPDX-License-Identifier: Apache-2.0
"""Event loops of a rollout worker's samples."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

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
