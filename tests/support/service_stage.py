# SPDX-License-Identifier: Apache-2.0
"""A manager with a store in memory, for tests."""

import asyncio
from contextlib import asynccontextmanager

from dlrover.python.rl.common.errors import ServiceUnavailable
from dlrover.python.rl.service.jobs.records import JobDescription, JobRecord, StopJob, SubmitJob
from dlrover.python.rl.service.jobs.store import SqliteJobStore
from dlrover.python.rl.service.manager import JobManager
from dlrover.python.rl.service.runner import MemoryRunner

WITHIN_S = 20.0


class FullDisk(SqliteJobStore):
    """Refuses to write while ``full``."""

    full = False

    def write(self, *change):
        if self.full:
            raise ServiceUnavailable("the service cannot save: disk full; nothing was changed")
        super().write(*change)


def submission(name="job", token=None, run_folders="", **values):
    values = {
        "owner": "ann",
        "fingerprint": f"of {name}",
        "resources": {"cpu": 1.0},
        "roles": {"ROLLOUT": 2},
        **values,
    }
    job = JobRecord(name, "", client_token=token or f"token-{name}", **values)
    return SubmitJob(job, JobDescription("text"), run_folders)


def stopping(manager, name="job", hard=False):
    return StopJob(name, manager.get(name).run, "asked to", hard)


@asynccontextmanager
async def serving(folder, runner=None, limits=None, store=None):
    manager = JobManager(store or SqliteJobStore(folder), runner or MemoryRunner(), limits)
    await manager.start()
    try:
        yield manager
    finally:
        await manager.close()


async def until(condition, within_s=WITHIN_S):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
