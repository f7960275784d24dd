# SPDX-License-Identifier: Apache-2.0
"""A reward function in a child process with a deadline: it may loop, exhaust memory or kill its interpreter.

The child is a fresh interpreter that imports this module and the function's, but neither the parent's main script nor
its memory. Verifiers run in parallel: a hanging sample uses only its own deadline."""

import math
import queue
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from dlrover.python.rl.common.by_value import readable_name
from dlrover.python.rl.common.errors import VerifierCrashed, VerifierError, VerifierTimeout
from dlrover.python.rl.environment.core.functions import REWARDS
from dlrover.python.rl.environment.core.scoring import Completed, Reward, WeightedRewards
from dlrover.python.rl.environment.sandbox.child_process import (
    Channel,
    ChildEnded,
    ChildProcess,
    Reply,
    error_reply,
    pack_call,
)

_ORPHAN_GRACE_S = 5.0
_MAX_REPLY_BYTES = 1 << 20


class RewardServer:
    """Loads the functions named in ``weights`` and answers calls, in the child.

    SIGALRM ends the process after a limit even if parent and warden are gone and the function blocks the interpreter;
    the parent's limit is earlier."""

    def __init__(self, weights: dict[str, float], columns: list[str], limit_s: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, limit_s + _ORPHAN_GRACE_S)
        self._rewards = WeightedRewards.load(weights, columns)
        self.ready: Reply = {"compares": self._rewards.compares}

    def serve(self, channel: Channel) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        while (request := channel.receive()) is not None:
            number, _, (samples, limit_s) = request
            signal.setitimer(signal.ITIMER_REAL, limit_s + _ORPHAN_GRACE_S)
            try:
                rewards = self._rewards.now([Completed(*fields) for fields in samples])
                reply: Reply = {"rewards": [(reward.total, reward.parts) for reward in rewards]}
            except Exception as error:  # noqa: BLE001 - the process boundary: the parent reports any error
                reply = error_reply(error)
            signal.setitimer(signal.ITIMER_REAL, 0)
            channel.send(number, reply)


class DeadlineVerifier(AbstractContextManager["DeadlineVerifier"]):
    """Calls a reward function in a child process, for at most ``timeout_s`` a sample.

    Calls from several threads run one by one; each deadline starts with its call. In a coroutine use
    ``asyncio.to_thread``. The first 10,000 characters of a call's output go to standard error.

    Args:
        function: ``"package.module:function"``, a registered name, or a function of an importable module, sync or
            async; or several with weights, whose weighted sum is the reward.
        timeout_s: seconds for each sample of a call.
        start_timeout_s: seconds to start the child and load the function.
        memory_mb: address space of the child in MB, including libraries; None: no limit.
        columns: of all rows of the data, see :class:`~dlrover.python.rl.environment.core.scoring.RewardFunction`.

    Raises:
        ValueError: ``function`` has no importable name, or a limit is not positive and finite.
        VerifierError: the child could not load it."""

    def __init__(
        self,
        function: str | Callable[..., Any] | Mapping[Any, float],
        timeout_s: float,
        start_timeout_s: float = 60.0,
        memory_mb: int | None = None,
        columns: Collection[str] = (),
    ) -> None:
        if not (0 < timeout_s < math.inf and 0 < start_timeout_s < math.inf and (memory_mb is None or memory_mb > 0)):
            limits = f"{timeout_s}, {start_timeout_s} and {memory_mb}"
            raise ValueError(f"limits must be positive and finite, not {limits}")
        weighted = list(function.items()) if isinstance(function, Mapping) else [(function, 1.0)]
        self._weights = {_importable_name(each): float(weight) for each, weight in weighted}
        self._name = " + ".join(map(readable_name, self._weights))
        self._timeout_s, self._start_timeout_s, self._memory_mb = timeout_s, start_timeout_s, memory_mb
        self._columns, self._lock = sorted(columns), threading.Lock()
        self._closed, self._child = False, self._start()
        self.compares = False
        """True if a function gets all samples of a batch at once."""
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def __call__(self, completion: str, answer: str | None, extra_info: dict[str, Any] | None = None) -> float:
        """Return the reward of one sample, as :meth:`score_all`."""
        return self.score_all([Completed(completion, answer, extra_info or {})])[0].total

    def score_all(self, samples: Sequence[Completed]) -> list[Reward]:
        """Return the rewards of samples, in one call. Raises VerifierTimeout if it is late, VerifierCrashed if the
        child ends, and VerifierError if the function raises, or returns no reward."""
        limit_s = self._timeout_s * len(samples)
        request = pack_call("score", [tuple(sample) for sample in samples], limit_s)
        with self._lock:
            if self._closed:
                raise ValueError(f"the verifier {self._name} is closed")
            self._await_ready()
            reply = self._wait(self._child.submit(*request), limit_s, "gave no reward")
        if "error" in reply:
            raise VerifierError(f"{self._name} {reply['error']}", str(reply.get("traceback", "")))
        return [Reward(float(total), dict(parts)) for total, parts in reply["rewards"]]

    def close(self) -> None:
        """Kill the child and its descendants; waits for a running call. May be called again."""
        with self._lock:
            self._closed = True
            self._child.end()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> ChildProcess:
        arguments = [self._weights, self._columns, self._start_timeout_s]
        return ChildProcess(self, RewardServer, arguments, self._memory_mb, _MAX_REPLY_BYTES)

    def _await_ready(self) -> None:
        reply = self._wait(self._child.ready, self._start_timeout_s, "could not be loaded")
        if "error" in reply:
            self._child.end()
            self._child = self._start()
            raise VerifierError(f"{self._name} could not be loaded", str(reply.get("traceback", "")))
        self.compares = bool(reply["compares"])

    def _wait(self, answer: "Future[Reply]", timeout_s: float, failure: str) -> Reply:
        """Return the reply; a failure replaces the child."""
        try:
            return answer.result(timeout_s)
        except BaseException as error:
            self._child.end()
            self._child = self._start()
            if isinstance(error, TimeoutError):
                message = f"{failure} within {timeout_s:g} s; its process was killed"
                raise VerifierTimeout(f"{self._name} {message}") from None
            if isinstance(error, ChildEnded):
                raise VerifierCrashed(f"the process of {self._name} ended: {error}") from None
            raise


def _importable_name(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        module, colon, path = function.partition(":")
        if not (module and colon and path) and function not in REWARDS.places():
            raise ValueError(f"'{function}' is not of the form 'package.module:function'")
        return function
    home, path = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "<nameless>")
    if home == "__main__" or "<" in path:
        advice = "define it at the top level of a module that is not the main script"
        raise ValueError(f"{function!r} cannot be imported by another process: {advice}")
    return f"{home}:{path}"


class VerifierPool:
    """``workers`` verifier processes, made by ``start``, whose errors leave no process behind."""

    def __init__(self, workers: int, start: Callable[[], DeadlineVerifier]) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")
        self._idle: queue.SimpleQueue[DeadlineVerifier] = queue.SimpleQueue()
        starting = [self._threads.submit(start) for _ in range(workers)]
        failed = [error for started in starting if (error := started.exception())]  # waits: at most a start's own limit
        self._all = [started.result(0) for started in starting if not started.exception()]  # waits: no more
        if failed:
            self.close()
            raise failed[0]
        for verifier in self._all:
            self._idle.put(verifier)

    def score(self, samples: Iterable[Completed]) -> list[Reward | VerifierError]:
        """Return the reward of each sample, or its error, in order."""
        waiting = list(samples)
        if waiting and self._all[0].compares:
            return self._score_call(waiting)
        return [result for (result,) in self._threads.map(self._score_call, ([sample] for sample in waiting))]

    def _score_call(self, samples: Sequence[Completed]) -> list[Reward | VerifierError]:
        verifier = self._idle.get_nowait()  # there are as many as threads
        try:
            return [*verifier.score_all(samples)]
        except VerifierError as error:
            return [error] * len(samples)
        finally:
            self._idle.put(verifier)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for verifier in self._all:
            verifier.close()
