# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: noted where nothing may be interrupted, insisted on where user code runs."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_AGAIN_S = 0.5
_TIMES = 4


class Interrupts:
    """Counts signals while it is entered, so that they interrupt no line. Outside the main thread it counts nothing."""

    def __init__(self, *signals: int) -> None:
        self.count = 0
        self._signals = signals
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


@contextmanager
def insistent_interrupts() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise KeyboardInterrupt, and again until the block is left: Python drops an exception
    in a finalizer or a callback. Handlers that are not Python's own stay; outside the main thread nothing changes."""
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    left = threading.Event()
    repeats = threading.Thread(
        target=_repeat, args=(left, threading.get_ident()), name="dlrover-interrupt", daemon=True
    )

    def interrupt(number: int, frame: FrameType | None) -> None:
        if left.is_set():
            return
        if repeats.ident is None:
            repeats.start()
        raise KeyboardInterrupt

    taken = [number for number, handler in usual.items() if signal.getsignal(number) == handler]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        left.set()
        for number in taken:
            signal.signal(number, usual[number])


def _repeat(left: threading.Event, thread: int) -> None:
    for _ in range(_TIMES):  # not for ever: at the prompt of a debugger each of them is shown
        if left.wait(_AGAIN_S):
            return
        signal.pthread_kill(thread, signal.SIGINT)
