# SPDX-License-Identifier: Apache-2.0
"""Simulated time: one thread, one seeded source of chance, one trace."""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any


class Violation(AssertionError):
    """Something happened that must never happen."""


class World:
    """Runs callbacks in the order of their times.

    Args:
        seed: of everything that chance decides.
    """

    def __init__(self, seed: int, keep_lines: bool = False) -> None:
        self.seed, self.rng, self.now_s = seed, Random(seed), 0.0
        self.sometimes: Counter[str] = Counter()
        self.lines: list[str] = []
        self._keep = keep_lines
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._hash = hashlib.blake2b(digest_size=8)

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call back after ``delay_s``."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, call, arguments))

    def within(self, low_s: float, high_s: float) -> float:
        """A time that chance decides."""
        return low_s + (high_s - low_s) * self.rng.random()

    def run_until(self, end_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass up to ``end_s`` or until ``done``; says which."""
        while not done():
            if not self._heap or self._heap[0][0] > end_s:
                self.now_s = end_s
                return done()
            self.now_s, _, call, arguments = heapq.heappop(self._heap)
            call(*arguments)
        return True

    def trace(self, *words: Any) -> None:
        """Write one line of what happened."""
        line = f"{self.now_s:.6f} {' '.join(map(str, words))}"
        self._hash.update(line.encode())
        if self._keep:
            self.lines.append(line)

    def trace_hash(self) -> str:
        """What tells this run from every other."""
        return self._hash.hexdigest()
