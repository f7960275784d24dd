# SPDX-License-Identifier: Apache-2.0
"""Measures how long the trainer's calls to its members take."""

import threading
from bisect import bisect_left
from collections import Counter

from dlrover.python.rl.trainer.call_counts import BUCKETS_S, CallCounts

_MOST_PENDING = 10_000


class CallTimes:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[bytes, tuple[str, str, float]] = {}
        self._counts: dict[tuple[str, str], list[float]] = {}

    def begin(self, call: bytes, role: str, method: str, now_s: float) -> None:
        with self._lock:
            if len(self._pending) >= _MOST_PENDING:  # results that nobody waited for
                del self._pending[next(iter(self._pending))]
            self._pending[call] = role, method, now_s

    def end(self, call: bytes, now_s: float) -> None:
        """Nothing for a call that has ended already."""
        with self._lock:
            begun = self._pending.pop(call, None)
            if begun is None:
                return
            role, method, began_s = begun
            counts = self._counts.setdefault((role, method), [0.0] * (len(BUCKETS_S) + 2))
            counts[bisect_left(BUCKETS_S, now_s - began_s)] += 1
            counts[-1] += now_s - began_s

    def pending(self) -> dict[str, int]:
        """Role to its calls whose results nobody has had yet."""
        with self._lock:
            return dict(Counter(role for role, _, _ in self._pending.values()))

    def drain(self) -> CallCounts:
        """What was counted since the last time."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return {key: tuple(values) for key, values in counts.items()}
