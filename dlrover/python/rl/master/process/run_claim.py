# SPDX-License-Identifier: Apache-2.0
"""The master's hold on its run's folder, and the copy of its own output there."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobConflict
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.owner import FAILED, ON_RAY, newest_owner, write_shared
from dlrover.python.rl.runtime.process.heartbeat import leave
from dlrover.python.rl.runtime.process.log_copy import LogCopier, copy_all_rests, copy_output
from dlrover.python.rl.runtime.ray.cluster.cluster import current_address
from dlrover.python.rl.runtime.run_folder import BEAT_S, CLUSTER, Claim, claim

_LOG = get_logger(__name__)


class RunClaim:
    """Without ``claims`` the process that started the job holds the folder."""

    def __init__(self, job: JobSpec, claims: bool) -> None:
        self._job, self._claims = job, claims
        self._claim: Claim | None = None
        self._log: LogCopier | None = None

    def take(self) -> None:
        """Not in a thread: until it is done, no other request may resume too. Raises JobConflict."""
        if self._claims:
            self._claim = claim(self._job, ON_RAY, bound=False)
            with suppress(OSError):
                write_shared(self._job.job_dir / CLUSTER, current_address().encode())
        if self._log is None:
            self._log = copy_output(self._job.job_dir, "master", "master")

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Raises InvalidJob, and gives the folder back, if a file in it cannot be written."""
        try:
            yield
        except OSError as error:
            self.leave(FAILED)
            raise InvalidJob([ConfigError("job_dir", f"the master cannot use it: {error}")]) from error

    async def hold(self, is_over: Callable[[], bool]) -> None:
        """Show life until the job ``is_over``. Raises JobConflict if another run has the folder."""
        while self._claim is not None and not is_over():
            await asyncio.sleep(BEAT_S)
            try:
                await asyncio.to_thread(self._claim.beat)
            except JobConflict as error:
                owner = newest_owner(self._job.job_dir)
                if owner is not None and owner.run == self._job.run:
                    leave(f"another process of this master has taken over: {error}")
                raise

    def leave(self, outcome: str) -> None:
        """Also of a folder that fails: the master ends all the same."""
        try:
            try:
                if self._log is not None:
                    self._log.copy()
                copy_all_rests(self._job.job_dir)
            finally:
                if self._claim is not None:
                    self._claim.end(outcome)
        except OSError as error:
            _LOG.error("how %s has ended is not in its folder: %s", self._job.name, error)
