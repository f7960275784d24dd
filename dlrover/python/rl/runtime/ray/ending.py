"""How a cluster of our own ends: in order, and with everything that it has started.

::

    SIGTERM --> SystemExit in the main thread --> actors end --> ray.shutdown() --> what the raylet has left is killed

Ray's handler would kill the cluster first, under the hands of those who then wait for it.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_KILLED_S = 5.0
_TERMINATED = 128 + signal.SIGTERM


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[Callable[[], None]]:
    """Inside, SIGTERM ends this process as an error would: contexts and exit handlers run. A second one does nothing.

    Yields:
        What takes the signal back from a library that has set a handler of its own.

    A handler that was there before stays. Outside the main thread, which alone may set one, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    wanted = _unwind if before in (None, signal.SIG_DFL) else before

    def take_back() -> None:
        signal.signal(signal.SIGTERM, wanted)

    take_back()
    try:
        yield take_back
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _unwind(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(_TERMINATED)


@contextlib.contextmanager
def children_end(parent: int, patience_s: float = 2.0) -> Iterator[None]:
    """After the block, which ends a process, those that it had started before are dead too.

    Args:
        parent: the process.
        patience_s: how long they may take to end by themselves, before they are killed.

    A raylet that does not end within a second is killed by Ray; its agents then look for the GCS for a minute more.
    """
    with contextlib.ExitStack() as stack:
        children = []
        for pid in _children(parent):
            with contextlib.suppress(ProcessLookupError):
                children.append(os.pidfd_open(pid))
                stack.callback(os.close, children[-1])
        try:
            yield
        finally:
            deadline_s = time.monotonic() + patience_s
            for child in children:
                _end(child, deadline_s)


def _end(child: int, deadline_s: float) -> None:
    death = select.poll()
    death.register(child, select.POLLIN)
    if not death.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        death.poll(_KILLED_S * 1000)


def _children(parent: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(process.name))
    return found
