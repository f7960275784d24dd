"""Waiting for another process that may be gone."""

import time
from collections.abc import Callable

from dlrover.python.rl.common.errors import WeightSyncError

_QUICK_S, _SLOW_S = 50e-6, 5e-3
_BRIEF_S = 0.02


class Waiting:
    """Pauses between two looks at what another process does: short ones at first.

    Args:
        limit_s: how long nothing may move.
        what: says in the error what was waited for.
        alive: raises when the other process is gone; called now and then once nothing moves.
    """

    def __init__(self, limit_s: float, what: Callable[[], str], alive: Callable[[], None] = lambda: None) -> None:
        self._limit_s, self._what, self._alive = limit_s, what, alive
        self.moved()

    def moved(self) -> None:
        """Something has: the limit counts from now."""
        self._since_s = time.monotonic()

    def pause(self) -> None:
        """Wait a moment.

        Raises:
            WeightSyncError: nothing has moved for too long, or the other process is gone.
        """
        idle_s = time.monotonic() - self._since_s
        if idle_s > self._limit_s:
            raise WeightSyncError(f"{self._what()}: nothing has moved for {self._limit_s:g} s")
        if idle_s > _BRIEF_S:
            self._alive()
        time.sleep(_QUICK_S if idle_s < _BRIEF_S else _SLOW_S)
