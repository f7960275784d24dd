# SPDX-License-Identifier: Apache-2.0
"""A manager with a store in memory, for tests."""

from contextlib import asynccontextmanager

from dlrover.python.rl.common.errors import ServiceUnavailable
from dlrover.python.rl.service.jobs.records import JobDescription, JobPhase, JobRecord, Observed, StopJob, SubmitJob
from dlrover.python.rl.service.jobs.store import SqliteJobStore
from dlrover.python.rl.service.manager import JobManager
from dlrover.python.rl.service.runner import MemoryRunner
from tests.support.async_tests import until

WITHIN_S = 20.0


class FullDisk(SqliteJobStore):
    """Refuses to write while ``full``."""

    full = False

    def write(self, *change):
        if self.full:
            raise ServiceUnavailable("the service cannot save: disk full; nothing was changed")
        super().write(*change)


class StillRunner(MemoryRunner):
    """Jobs that begin to run, and then only do what the test reports."""

    def run(self, record, description):
        self.begun.append(record.run)
        self.report(record, roles={"ROLLOUT": 2})

    def report(self, record, phase=JobPhase.RUNNING, **values):
        self._sink(Observed(record.name, record.run, phase, **values))


def submission(name="job", token=None, run_folders="", **values):
    values = {"owner": "ann", "fingerprint": f"of {name}", "resources": {"cpu": 1.0}, "roles": {"ROLLOUT": 2}, **values}
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


async def begin(manager, name="job", **values):
    """Submit a job, and wait until it runs; gives its record as submitted."""
    record = await manager.ask(submission(name, **values))
    await until(lambda: manager.get(name).phase is JobPhase.RUNNING)
    return record


async def events(manager, *arguments, **options):
    return [event async for page in manager.watch(*arguments, **options) for event in page]
