"""Ctrl-C as something that is looked at, not something that strikes in the middle of a line."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Counts Ctrl-C while it is entered. Outside the main thread, where signals cannot be caught, it counts nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
