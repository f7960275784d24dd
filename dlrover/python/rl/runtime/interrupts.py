# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: noted where nothing may be interrupted, insisted on where user code runs. SIGHUP, of a terminal
that was closed, is treated as SIGTERM."""

import errno
import os
import signal
import stat
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_AGAIN_S = 0.5
_TIMES = 4
_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def noted_signals(*signals: int) -> Iterator[list[int]]:
    """Yield a list of the ``signals`` received in the block, which interrupt nothing; empty outside the main thread."""
    noted: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, lambda number, _: noted.append(number)) for each in signals if is_main}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def insistent_interrupts() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt repeatedly until the block ends: Python drops an exception in a
    finalizer or a callback. Handlers other than Python's stay; outside the main thread nothing changes."""
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    left = threading.Event()
    thread = threading.get_ident()
    repeats = threading.Thread(target=_repeat, args=(left, thread), name="dlrover-interrupt", daemon=True)

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
    for _ in range(_TIMES):  # not for ever: a debugger's prompt shows each of them
        if left.wait(_AGAIN_S):
            return
        signal.pthread_kill(thread, signal.SIGINT)


@contextmanager
def sigterm_unwinds() -> Iterator[Callable[[], None]]:
    """Let SIGTERM raise SystemExit once, again if a finalizer swallows it, so that exit handlers run. Earlier handlers
    stay; outside the main thread nothing changes. Yields a function that restores a handler that a library replaced."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    handler = _unwind if before in (None, signal.SIG_DFL) else before
    report, repeats = sys.unraisablehook, list[threading.Timer]()

    def take_back() -> None:
        signal.signal(signal.SIGTERM, handler)

    def repeat_swallowed(swallowed: "sys.UnraisableHookArgs") -> None:
        if not isinstance(swallowed.exc_value, _Terminated):
            report(swallowed)
            return
        take_back()
        repeats.append(threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM)))
        repeats[-1].daemon = True
        repeats[-1].start()

    take_back()
    if handler is _unwind:
        sys.unraisablehook = repeat_swallowed
    try:
        yield take_back
    finally:
        for repeat in repeats:
            repeat.cancel()
        sys.unraisablehook = report
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Terminated(SystemExit):
    """Raised by SIGTERM."""


def _unwind(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise _Terminated(_TERMINATED)


def hangup_terminates() -> None:
    """Treat SIGHUP, which a closed terminal sends, as SIGTERM from now on, unless it is ignored (``nohup``)."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _hang_up)


def _hang_up(number: int, frame: FrameType | None) -> None:
    """Silence closed outputs, since printing would fail and leave the cleanup undone, and terminate."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in filter(_may_be_closed, (1, 2)):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _may_be_closed(descriptor: int) -> bool:
    """Return True for a closed terminal, and for a pipe to a program that got SIGHUP as well."""
    try:
        termios.tcgetattr(descriptor)
    except termios.error as error:
        return error.args[0] == errno.EIO or stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    return False
