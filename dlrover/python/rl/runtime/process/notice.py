# SPDX-License-Identifier: Apache-2.0
"""Notices that a node will go: SIGTERM to a process of the job, as schedulers send it, or a file of an agent."""

import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType


class DepartureNotice:
    """What this process was told; ``file`` is looked for at each reading, ``""`` for none. SIGTERM is taken once, where
    this is made in the main thread: a second one does what it did before."""

    def __init__(self, file: str = "") -> None:
        self._file = Path(file) if file else None
        self._told, self._before = "", signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._told = "it was sent SIGTERM"
        signal.signal(number, self._before or signal.SIG_DFL)

    def read(self) -> str:
        """The notice, "" for none."""
        with suppress(OSError):
            if not self._told and self._file is not None and self._file.exists():
                self._told = f"{self._file} is there"
        return self._told
