# SPDX-License-Identifier: Apache-2.0
"""Where job files are read: it takes milliseconds of Python for each, which other calls would wait for."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, ServiceBusy, ServiceUnavailable
from dlrover.python.rl.service.jobs.records import SubmitJob
from dlrover.python.rl.service.jobs.submissions import check_submission
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire

_MAX_WAITING = 64
"""Submissions of one caller that are being read, or wait for it."""

_MAX_S = 5.0
"""Hundreds of times what a job file takes."""


def in_a_thread() -> Executor:
    return ThreadPoolExecutor(1, "job-files")


def in_a_process() -> Executor:
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_the_service)
    executor.submit(os.getpid)  # starts it
    return executor


class SubmissionReader:
    """Raises from :meth:`read` also ServiceBusy, for a caller that submits faster than files are read, and
    ServiceUnavailable, when the process that read the file has died."""

    def __init__(self, make: Callable[[], Executor] = in_a_thread) -> None:
        self._make, self._executor = make, make()
        self._waiting = CallLimit(_MAX_WAITING, "submissions that are being read")

    async def read(self, request: wire.SubmitRequest, owner: str, root: Path) -> SubmitJob:
        """See :func:`check_submission`."""
        executor, loop = self._executor, asyncio.get_running_loop()
        with ExitStack() as stack:
            stack.enter_context(self._waiting.hold(owner))
            try:
                reading = executor.submit(_read, request.SerializeToString(), owner, root)
                place = stack.pop_all()
                reading.add_done_callback(lambda _: loop.call_soon_threadsafe(place.close))  # not when nobody waits
                found = await asyncio.wrap_future(reading)
            except BrokenExecutor as error:
                if executor is self._executor:
                    self._executor = self._make()
                raise ServiceUnavailable("the process that read the job file has died: try again") from error
        if isinstance(found, SubmitJob):
            return found
        raise InvalidJob(found)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _read(request: bytes, owner: str, root: Path) -> SubmitJob | tuple[ConfigError, ...]:
    try:
        with _at_most(_MAX_S):
            return check_submission(wire.SubmitRequest.FromString(request), owner, root)
    except InvalidJob as error:
        return error.errors
    except _TooLong:
        return (ConfigError("job_file", f"takes longer than {_MAX_S:g} s to read"),)


class _TooLong(BaseException):
    """Not an error that code which reads might handle."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Ends the block with _TooLong; only a process's main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _end_with_the_service() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the service, which then ends this process

    def end() -> None:
        service = multiprocessing.parent_process()
        assert service is not None, "this process was started by multiprocessing"
        service.join()  # waits: for the end of the service, however it ends
        os._exit(0)

    threading.Thread(target=end, name="end-with-the-service", daemon=True).start()


class CallLimit:
    """How many calls of one caller are answered at the same time."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, caller: str) -> Iterator[None]:
        """Raises ServiceBusy."""
        if self._held[caller] >= self._most:
            raise ServiceBusy(f"'{caller}' has {self._most} {self._what}, as many as allowed: end some, or wait")
        self._held[caller] += 1
        try:
            yield
        finally:
            self._held[caller] -= 1
            if not self._held[caller]:
                del self._held[caller]
