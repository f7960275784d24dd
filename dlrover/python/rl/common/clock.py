# SPDX-License-Identifier: Apache-2.0
"""Time as a parameter: code that needs it takes a :class:`Clock`, and tests pass a :class:`ManualClock`."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch, for people."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class ManualClock:
    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
