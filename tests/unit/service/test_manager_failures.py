# SPDX-License-Identifier: Apache-2.0
"""The manager while its disk or its cluster is away, and what it reads in pages."""

import asyncio

import pytest

from dlrover.python.rl.common.errors import ServiceUnavailable, UnknownJob
from dlrover.python.rl.service import manager as manager_module
from dlrover.python.rl.service.jobs import ledger as ledger_module
from dlrover.python.rl.service.jobs.ledger import Draft, Ledger, QueueLimits
from dlrover.python.rl.service.jobs.records import JobPhase, Observed, Schedule
from dlrover.python.rl.service.jobs.store import SqliteJobStore
from dlrover.python.rl.service.manager import JobManager
from dlrover.python.rl.service.runner import MemoryRunner
from tests.support.service_stage import WITHIN_S, FullDisk, serving, submission, until


def run(body):
    asyncio.run(asyncio.wait_for(body, WITHIN_S))


async def events(manager, *arguments):
    return [event async for page in manager.watch(*arguments, follow=False) for event in page]


class StillRunner(MemoryRunner):
    def run(self, record, description):
        self.report(record)

    def report(self, record, **values):
        self._sink(Observed(record.name, record.run, JobPhase.RUNNING, **values))


def test_a_refused_job_is_not_there_after_the_pause(tmp_path):
    async def body():
        store = FullDisk(tmp_path)
        async with serving(tmp_path, StillRunner(), store=store) as manager:
            store.full = True
            for name in ("one", "two"):  # the second is decided after the pause that follows the first
                with pytest.raises(ServiceUnavailable):
                    await manager.ask(submission(name))
            with pytest.raises(UnknownJob):
                manager.get("one")
            store.full = False
            await manager.ask(submission("three"))
            assert {event.name for event in await events(manager)} == {"three"}
            assert [event.number for event in await events(manager)][:1] == [1]

    run(body())


def test_reports_that_come_together_keep_their_order(tmp_path):
    async def body():
        store = FullDisk(tmp_path)
        async with serving(tmp_path, StillRunner(), store=store) as manager:
            record = await manager.ask(submission())
            await until(lambda: manager.get("job").phase is JobPhase.RUNNING)
            store.full = True
            for step in (1, 2, 3):
                manager._runner.report(record, step=step)
            with pytest.raises(ServiceUnavailable):
                await manager.ask(submission("two"))
            store.full = False
            await until(lambda: manager.get("job").step == 3)
            assert [event.step for event in await events(manager, "job") if event.kind == "step"] == [1, 2, 3]

    run(body())


@pytest.mark.parametrize("page", [1, 2, 1000])
def test_events_on_disk_come_in_pages_of_any_size(tmp_path, monkeypatch, page):
    async def body():
        async with serving(tmp_path, MemoryRunner(steps=3)) as manager:
            await manager.ask(submission())
            await manager.wait("job", WITHIN_S)
            recent = await events(manager)
        monkeypatch.setattr(manager_module, "_PAGE", page)
        async with serving(tmp_path) as manager:
            assert await events(manager) == await events(manager, "job") == recent

    run(body())


def test_a_cluster_that_was_away_is_looked_at_again(tmp_path):
    class Growing(StillRunner):
        looks = 0

        async def capacity(self):
            self.looks += 1
            if self.looks == 2:
                raise ConnectionError("Ray is away")
            return {"cpu": 1.0 if self.looks == 1 else 8.0}

    async def body():
        manager = JobManager(SqliteJobStore(tmp_path), Growing(), capacity_every_s=0.01)
        await manager.start()
        await manager.ask(submission(resources={"cpu": 4.0}))
        await until(lambda: manager.get("job").phase is JobPhase.RUNNING)
        await manager.close()

    run(body())


def test_what_is_saved_is_synced(tmp_path):
    store = SqliteJobStore(tmp_path)
    full = 2  # of SQLite: with 1, NORMAL, a power cut takes the last writes
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (full,)
    store.close()


def test_the_newest_run_of_a_name_outlives_an_older_one(monkeypatch):
    monkeypatch.setattr(ledger_module, "KEPT_ENDED", 1)
    ledger, runs = Ledger(QueueLimits()), iter("ab")
    ledger.capacity = {"cpu": 1.0}
    for token in ("first", "second"):
        draft = Draft(ledger, lambda: next(runs))
        record = draft.decide(submission(token=token), 0.0)
        draft.decide(Schedule(), 0.0)
        draft.decide(Observed(record.name, record.run, JobPhase.FINISHED), 1.0)
        forgotten = ledger.adopt(draft)
    assert forgotten == ["a"] and "a" not in ledger.records
    assert ledger.get("job").run == "b" and ("ann", "first") not in ledger.tokens
