"""Several verifiers side by side: a sample that hangs costs its own deadline, not the others' turn."""

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.deadline import DeadlineVerifier

Asked: TypeAlias = tuple[str, str | None, dict[str, Any]]
"""Completion, answer and the user's own data."""


class VerifierPool:
    """``workers`` verifier processes; each judges one sample at a time, and is replaced at once when it was killed.

    Args:
        workers: how many.
        start: makes one; raises when the reward function cannot be loaded.

    Raises:
        VerifierError: ``start`` raised it; no process is left.
    """

    def __init__(self, workers: int, start: Callable[[], DeadlineVerifier]) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")
        self._idle: queue.SimpleQueue[DeadlineVerifier] = queue.SimpleQueue()
        self._all: list[DeadlineVerifier] = []
        starting = [self._threads.submit(start) for _ in range(workers)]
        failed = [error for started in starting if (error := started.exception())]  # waits: at most a start's own limit
        self._all = [started.result(0) for started in starting if not started.exception()]  # waits: no more
        if failed:
            self.close()
            raise failed[0]
        for verifier in self._all:
            self._idle.put(verifier)

    def judge(self, asked: Iterable[Asked]) -> list[float | VerifierError]:
        """The reward of each sample, or why it has none, in the order asked."""
        return list(self._threads.map(self._one, asked))

    def _one(self, asked: Asked) -> float | VerifierError:
        verifier = self._idle.get_nowait()  # As many as threads: there is always one.
        try:
            return verifier(*asked)
        except VerifierError as error:
            return error
        finally:
            self._idle.put(verifier)

    def close(self) -> None:
        """End all processes; waits for the calls in flight."""
        self._threads.shutdown(cancel_futures=True)
        for verifier in self._all:
            verifier.close()
