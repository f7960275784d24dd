# SPDX-License-Identifier: Apache-2.0
"""Blocking calls that are awaited, and do not keep the process from ending, as those of ``asyncio.to_thread`` do."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def in_daemon_thread(call: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
    """The result of a call in a thread of its own, which goes on when the future is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(act: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            act(outcome)

    def run() -> None:
        act: Callable[[Any], None] = future.set_result
        outcome: Any
        try:
            outcome = call(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting loop
            act, outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
            loop.call_soon_threadsafe(settle, act, outcome)

    threading.Thread(target=run, name=getattr(call, "__name__", "call"), daemon=True).start()
    return future
