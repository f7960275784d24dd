# SPDX-License-Identifier: Apache-2.0
"""Places in the job's own code where a fault can be made to strike: files, so that any process can reach them.

::

    injector: arm(name) -> name.armed     a workload gets there -> name.taken.<pid>     injector: kill that pid
"""

import math
import os
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "DLROVER_CHAOS_FOLDER"
"""Environment variable: the folder that the injector and the job's processes share."""

_HELD_S = 20.0
_LOOK_S = 0.005
_PACE, _PACE_S = "pace", 2.0


class Gates:
    """Gates in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_this_process(cls) -> "Gates":
        """Return the gates that the environment names; without it every gate is open."""
        return cls(Path(os.environ.get(FOLDER, os.devnull)))

    def arm(self, name: str) -> None:
        """The next process that comes to the gate takes it."""
        (self._folder / f"{name}.armed").touch()

    def take(self, name: str) -> bool:
        """Return True if the gate was armed, to one process alone."""
        try:
            (self._folder / f"{name}.armed").rename(self._folder / f"{name}.taken.{os.getpid()}")
        except OSError:  # not armed, or taken by another process
            return False
        return True

    def hold(self, name: str) -> None:
        """Come to a gate where one is killed: wait for that when it was armed."""
        if self.take(name):
            deadline_s = time.monotonic() + _HELD_S
            while time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)

    def allow(self, step: int | None) -> None:
        """Let the job run ahead to ``step``, slowly from there on; None: as far as it likes."""
        path = self._folder / _PACE
        if step is None:
            path.unlink(missing_ok=True)
            return
        fresh = path.with_suffix(".new")
        fresh.write_text(str(step))
        fresh.rename(path)

    def pace(self, step: int) -> None:
        """Come to a step: wait a little when the job has run ahead of those who disturb it."""
        deadline_s = time.monotonic() + _PACE_S
        while step > self._allowed() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)

    def _allowed(self) -> float:
        try:
            return int((self._folder / _PACE).read_text())
        except (OSError, ValueError):
            return math.inf

    def await_taken(self, name: str, timeout_s: float) -> int | None:
        """Return the process that took the gate, or None if none did in time; the gate is open again afterwards."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for taken in self._folder.glob(f"{name}.taken.*"):
                taken.unlink()
                return int(taken.suffix[1:])
            time.sleep(_LOOK_S)
        with suppress(OSError):
            (self._folder / f"{name}.armed").unlink(missing_ok=True)
        return None
