"""Work on Ray that blocks, off the event loop, and waited for even when nobody wants its result any more.

A thread cannot be cancelled: an actor that is being made will be there, whoever was waiting for it.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """The threads of one executor."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a call in a thread. Cancelling this leaves the thread running."""
        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return await asyncio.shield(work)

    async def settle(self, timeout_s: float) -> None:
        """Wait until whatever runs has ended."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_s)
