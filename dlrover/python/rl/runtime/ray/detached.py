"""Ending and releasing things on Ray, whatever becomes of the job and of who asked for it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

_TRIES = 3
_PAUSE_S = 2.0


class Detached:
    """Work that nobody waits for; what goes wrong in it is logged.

    Args:
        job: the job's name, for the log.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._running: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin ``work``; the end of the job does not cancel it."""

        async def guarded() -> None:
            try:
                await work
            except Exception:  # noqa: BLE001 -- nobody waits for it
                _LOG.exception("%s: a process could not be ended", self._job)

        task = asyncio.get_running_loop().create_task(guarded())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def insist(self, action: Callable[[], Awaitable[None]]) -> None:
        """End or release something, again if need be: Ray's head may be away for a while."""
        for attempt in range(1, _TRIES + 1):
            try:
                await action()
                return
            except Exception:  # noqa: BLE001 -- the rest is done all the same
                _LOG.exception("%s: not everything could be ended or released (attempt %d)", self._job, attempt)
                await asyncio.sleep(_PAUSE_S)
