"""Whether a trainer makes progress: how long its own code has run without a word to its members."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dlrover.python.rl.common.clock import Clock, SystemClock
from dlrover.python.rl.runtime.ray.port import RayPort
from dlrover.python.rl.trainer.port import Call, Outcome, Ref


class Activity:
    """Notes when the trainer calls its members, and when it waits for them. Thread safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._waits = 0
        self._since_s = self._clock.now_s()

    def touch(self) -> None:
        """It has just called a member."""
        with self._lock:
            self._since_s = self._clock.now_s()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside it waits for others."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1
                self._since_s = self._clock.now_s()

    def own_s(self) -> float | None:
        """Seconds that its own code has run since; None while it waits."""
        with self._lock:
            return None if self._waits else self._clock.now_s() - self._since_s


class WatchedPort(RayPort):
    """The port over Ray actors, with every use noted in ``activity``."""

    def __init__(self, activity: Activity) -> None:
        super().__init__({})
        self._activity = activity

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        self._activity.touch()
        return super().submit(role, rank, call)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        with self._activity.waiting():
            return super().wait(refs, timeout_s)
