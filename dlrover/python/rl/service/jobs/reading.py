# SPDX-License-Identifier: Apache-2.0
"""Where job files are read: it takes milliseconds of Python for each, which other calls would wait for."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, ServiceUnavailable
from dlrover.python.rl.service.access.limits import CallLimit
from dlrover.python.rl.service.jobs.records import SubmitJob
from dlrover.python.rl.service.jobs.submissions import check_submission
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire

_MAX_WAITING = 64
"""Submissions of one caller that are being read, or wait for it."""


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
        with self._waiting.hold(owner):
            try:
                found = await loop.run_in_executor(executor, _read, request.SerializeToString(), owner, root)
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
        return check_submission(wire.SubmitRequest.FromString(request), owner, root)
    except InvalidJob as error:
        return error.errors


def _end_with_the_service() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the service, which then ends this process

    def end() -> None:
        service = multiprocessing.parent_process()
        assert service is not None, "this process was started by multiprocessing"
        service.join()  # waits: for the end of the service, however it ends
        os._exit(0)

    threading.Thread(target=end, name="end-with-the-service", daemon=True).start()
