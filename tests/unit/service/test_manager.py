# SPDX-License-Identifier: Apache-2.0
"""Jobs are submitted once, watched without a gap, and found again by the next process of the service."""

import asyncio
import json
from dataclasses import replace

import pytest

from dlrover.python.rl.common import errors
from dlrover.python.rl.service import manager as manager_module
from dlrover.python.rl.service.jobs.ledger import QueueLimits
from dlrover.python.rl.service.jobs.records import JobPhase, StopJob
from dlrover.python.rl.service.jobs.store import SqliteJobStore
from dlrover.python.rl.service.manager import JobManager
from dlrover.python.rl.service.runner import MemoryRunner
from tests.support.manual_clock import within
from tests.support.service_stage import (
    WITHIN_S,
    FullDisk,
    StillRunner,
    begin,
    events,
    serving,
    stopping,
    submission,
    until,
)


async def test_a_job_runs_to_its_end(tmp_path):
    async with serving(tmp_path, MemoryRunner(steps=2)) as manager:
        submitted = await manager.ask(submission())
        assert (submitted.phase, submitted.revision) == (JobPhase.QUEUED, 1)
        ended = await manager.wait("job", WITHIN_S)
        assert (ended.phase, ended.step, ended.reward, ended.reason) == (
            JobPhase.FINISHED, 2, 1.0, "all steps done",
        )  # fmt: skip
        seen = await events(manager, "job")
        assert [event.kind for event in seen] == ["submitted", "starting", "running", "step", "step", "finished"]
        assert [event.number for event in seen] == [1, 2, 3, 4, 5, 6]


async def test_the_same_token_gives_the_same_job_also_after_its_end(tmp_path):
    runner = MemoryRunner()
    async with serving(tmp_path, runner) as manager:
        first, second = await asyncio.gather(manager.ask(submission()), manager.ask(submission()))
        assert first.run == second.run
        await manager.wait("job", WITHIN_S)
        assert (await manager.ask(submission())).run == first.run
        assert runner.begun == [first.run]
    async with serving(tmp_path, runner) as manager:
        assert (await manager.ask(submission())).run == first.run


async def test_a_token_stands_for_one_request(tmp_path):
    async with serving(tmp_path) as manager:
        await manager.ask(submission())
        with pytest.raises(errors.CallError, match="client_token 'token-job' was used for another submission"):
            await manager.ask(submission(fingerprint="of another"))
        other = await manager.ask(submission("job-2", token="token-job", owner="bob"))
        assert other.name == "job-2"


async def test_a_name_is_free_again_when_its_job_has_ended(tmp_path):
    async with serving(tmp_path, StillRunner()) as manager:
        first = await manager.ask(submission())
        with pytest.raises(errors.JobConflict, match="'job' is queued|'job' is starting|'job' is running"):
            await manager.ask(submission(token="another"))
        manager._runner.report(first, JobPhase.FINISHED)
        await manager.wait("job", WITHIN_S)
        second = await manager.ask(submission(token="another"))
        assert second.run != first.run
        assert manager.get("job").run == second.run
        assert [record.run for record in manager.list_jobs(ended=True)] == [second.run, first.run]


async def test_list_has_all_live_jobs_before_the_newest_ended(tmp_path):
    async with serving(tmp_path, StillRunner(cpus=1)) as manager:
        for name in ("long", "first", "second", "third"):
            await manager.ask(submission(name))
            if name != "long":
                await manager.ask(stopping(manager, name))
        await manager.ask(submission("waiting"))
        listed = [record.name for record in manager.list_jobs(ended=True)]
        assert listed == ["waiting", "long", "third", "second", "first"]
        assert [record.name for record in manager.list_jobs()] == ["waiting", "long"]


async def test_a_queued_job_says_why_it_waits_and_is_stopped_at_once(tmp_path):
    async with serving(tmp_path, StillRunner(cpus=1)) as manager:
        await manager.ask(submission("one"))
        await manager.ask(submission("two"))
        await manager.ask(submission("three"))
        assert manager.get("two").reason == "the cluster is full: 1 cpu needed, 0 available"
        assert [record.reason for record in manager.list_jobs()][0] == "behind 'two' in the queue"
        assert (await manager.ask(stopping(manager, "two"))).phase is JobPhase.STOPPED
        assert manager.get("three").reason == "the cluster is full: 1 cpu needed, 0 available"


async def test_the_next_job_starts_when_one_has_ended(tmp_path):
    async with serving(tmp_path, StillRunner(cpus=1)) as manager:
        one = await manager.ask(submission("one"))
        await manager.ask(submission("two"))
        manager._runner.report(one, JobPhase.FAILED, reason="ROLLOUT[0] died", cause="process_died")
        await until(lambda: manager.get("two").phase is JobPhase.RUNNING)
        assert (manager.get("one").reason, manager.get("one").cause) == ("ROLLOUT[0] died", "process_died")


async def test_a_full_queue_refuses_in_one_line(tmp_path):
    async with serving(tmp_path, StillRunner(cpus=0), QueueLimits(max_queued=3, max_queued_per_owner=2)) as manager:
        await manager.ask(submission("one"))
        await manager.ask(submission("two"))
        with pytest.raises(errors.ServiceBusy, match="'ann' has 2 jobs in the queue, the limit"):
            await manager.ask(submission("three"))
        await manager.ask(submission("three", owner="bob"))
        with pytest.raises(errors.ServiceBusy, match="the queue is full: 3 jobs wait"):
            await manager.ask(submission("four", owner="eve"))


async def test_hard_stop_follows_a_graceful_one_until_the_end(tmp_path):
    class Deaf(StillRunner):
        stops = ()

        def stop(self, record):
            self.stops = (*self.stops, record.hard)
            if record.hard:
                self.report(record, JobPhase.STOPPED)

    runner = Deaf()
    async with serving(tmp_path, runner) as manager:
        await manager.ask(submission())
        for hard in (False, False, True):
            assert (await manager.ask(stopping(manager, hard=hard))).phase is JobPhase.STOPPING
        ended = await manager.wait("job", WITHIN_S)
        assert (ended.phase, ended.reason) == (JobPhase.STOPPED, "asked to")
        assert runner.stops == (False, True)
        assert await manager.ask(stopping(manager, hard=True)) == ended


async def test_unknown_names_are_answered_with_the_nearest(tmp_path):
    async with serving(tmp_path, StillRunner()) as manager:
        await manager.ask(submission("train-7b"))
        for ask in (lambda: manager.get("train-7"), lambda: manager.ask(StopJob("train-7", "", "asked to"))):
            with pytest.raises(errors.UnknownJob, match="no job named 'train-7': did you mean 'train-7b'"):
                answer = ask()
                await answer
        with pytest.raises(errors.UnknownJob):
            await events(manager, "train-7")


async def test_a_role_is_resized_while_the_job_runs(tmp_path):
    async with serving(tmp_path, MemoryRunner(step_s=60)) as manager:
        await begin(manager)
        assert (await manager.resize("job", "ROLLOUT", 3)).roles == {"ROLLOUT": 3}
        with pytest.raises(errors.InvalidJob, match="has no role 'ROLOUT': did you mean 'ROLLOUT'"):
            await manager.resize("job", "ROLOUT", 3)
        with pytest.raises(errors.InvalidJob, match="0 is not between 1 and"):
            await manager.resize("job", "ROLLOUT", 0)
        await manager.ask(stopping(manager))
        await manager.wait("job", WITHIN_S)
        with pytest.raises(errors.CallError, match="'job' is stopped: only a running job can be resized"):
            await manager.resize("job", "ROLLOUT", 2)


async def test_grown_role_keeps_its_share_of_the_cluster(tmp_path):
    """Four CPUs: two jobs of two workers, one of which grows, leave no room for a third."""

    async with serving(tmp_path, MemoryRunner(step_s=60, cpus=5.0)) as manager:
        values = {"resources": {"cpu": 2.0}, "per_member": {"ROLLOUT": {"cpu": 1.0}}}
        for name in ("first", "second"):
            await manager.ask(submission(name, **values))
        await until(lambda: manager.get("second").phase is JobPhase.RUNNING)
        grown = await manager.resize("first", "ROLLOUT", 3)
        assert grown.resources == {"cpu": 3.0}
        await manager.ask(submission("third", resources={"cpu": 1.0}))
        assert "the cluster is full" in manager.get("third").reason
        assert (await manager.resize("first", "ROLLOUT", 2)).resources == {"cpu": 3.0}  # its place is kept
        assert (await manager.resize("first", "ROLLOUT", 3)).resources == {"cpu": 3.0}
        await manager.ask(stopping(manager, "first"))
        await until(lambda: manager.get("third").phase is JobPhase.RUNNING)


async def test_restarted_service_continues_from_its_store(tmp_path):
    runner = StillRunner(cpus=2)
    async with serving(tmp_path, runner) as manager:
        for name in ("one", "two", "three"):
            await manager.ask(submission(name))
        await until(lambda: manager.get("two").phase is JobPhase.RUNNING)
        before = await events(manager, follow=False)
        runs = {record.name: record for record in manager.list_jobs()}
    runner = StillRunner(cpus=2)
    async with serving(tmp_path, runner) as manager:
        assert sorted(runner.begun) == sorted([runs["one"].run, runs["two"].run])
        assert await events(manager, follow=False) == before
        runner.report(runs["one"], JobPhase.FINISHED)
        await until(lambda: manager.get("three").phase is JobPhase.RUNNING)
        after = await events(manager, after=before[-1].number, follow=False)
        assert [(event.name, event.kind) for event in after] == [
            ("one", "finished"), ("three", "starting"), ("three", "running"),
        ]  # fmt: skip
        assert [event.number for event in after] == [len(before) + 1, len(before) + 2, len(before) + 3]


@pytest.mark.parametrize(
    ("place", "folder"),
    [({"run_folders": "/of/runs"}, "/of/runs/20010909-014640-{run}"), ({"folder": "/of/the/job"}, "/of/the/job")],
)
async def test_run_folder_is_fixed_when_the_job_is_submitted(tmp_path, in_zone, place, folder):
    in_zone("UTC")
    manager = JobManager(SqliteJobStore(tmp_path), StillRunner(), wall_s=lambda: 1e9)
    await manager.start()
    record = await begin(manager, **place)
    assert record.folder == folder.format(run=record.run)
    await manager.close()
    async with serving(tmp_path, StillRunner()) as manager:
        assert manager.get("job").folder == record.folder


@pytest.mark.parametrize(("address", "listed"), [("host:9100", True), ("[::1]:9100", True), ("evil/path?x:1", False)])
async def test_targets_are_the_endpoints_of_running_jobs(tmp_path, address, listed):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.json").write_text(json.dumps({"address": address}))
    async with serving(tmp_path / "state", StillRunner()) as manager:
        record = await begin(manager, folder=str(folder))
        labels = {"job_name": "job", "owner": record.owner}
        assert manager.targets() == ([{"targets": [address], "labels": labels}] if listed else [])
        manager._runner.report(record, JobPhase.FAILED, reason="no memory", cause="hung")
        await manager.wait("job", WITHIN_S)
        assert manager.targets() == []
        assert [each[:4] for each in manager.ended()] == [("job", record.owner, "failed", "hung")]


@pytest.mark.parametrize(("phase", "reason"), [(JobPhase.STOPPED, "asked to"), (JobPhase.FAILED, "no memory")])
async def test_stopped_job_has_the_reason_of_its_stop(tmp_path, phase, reason):
    class Deaf(StillRunner):
        def stop(self, record):
            pass

    async with serving(tmp_path, Deaf()) as manager:
        record = await begin(manager)
        await manager.ask(stopping(manager))
        manager._runner.report(record, phase, reason="no memory")
        ended = await manager.wait("job", WITHIN_S)
        assert (ended.phase, ended.reason) == (phase, reason)


async def test_reports_of_an_earlier_run_change_nothing(tmp_path):
    async with serving(tmp_path, StillRunner()) as manager:
        first = await manager.ask(submission())
        manager._runner.report(first, JobPhase.FINISHED)
        await manager.wait("job", WITHIN_S)
        second = await begin(manager, "job", token="another")
        manager._runner.report(first, JobPhase.FAILED, step=7)
        manager._runner.report(second, step=1)
        await until(lambda: manager.get("job").step == 1)
        assert manager.get("job").phase is JobPhase.RUNNING


async def test_unsaved_resize_is_an_error(tmp_path):
    store = FullDisk(tmp_path)
    async with serving(tmp_path, MemoryRunner(step_s=60), store=store) as manager:
        await begin(manager)
        store.full = True
        with pytest.raises(errors.ServiceUnavailable, match="cannot save: disk full"):
            await manager.resize("job", "ROLLOUT", 3)
        store.full = False


async def test_unsaved_change_has_not_happened(tmp_path):
    store = FullDisk(tmp_path)
    async with serving(tmp_path, StillRunner(), store=store) as manager:
        record = await begin(manager)
        before = await events(manager, follow=False)
        store.full = True
        for name in ("two", "three"):  # the second is decided after the pause that follows the first
            with pytest.raises(errors.ServiceUnavailable, match="cannot save: disk full"):
                await manager.ask(submission(name))
        with pytest.raises(errors.UnknownJob):
            manager.get("two")
        manager._runner.report(record, step=1)
        store.full = False
        await until(lambda: manager.get("job").step == 1)  # what the runner has seen is not lost
        assert (await manager.ask(submission("four"))).name == "four"
        after = await events(manager, after=before[-1].number, follow=False)
        assert [(event.name, event.kind) for event in after[:2]] == [("job", "step"), ("four", "submitted")]


async def test_reports_during_a_full_disk_keep_their_order(tmp_path):
    class CountingDisk(FullDisk):
        refused = 0

        def write(self, *change):
            self.refused += self.full
            super().write(*change)

    store = CountingDisk(tmp_path)
    async with serving(tmp_path, StillRunner(), store=store) as manager:
        record = await begin(manager)
        store.full = True
        for step in (1, 2):
            manager._runner.report(record, step=step, metrics={"reward": step}, roles={"ROLLOUT": 2 + step})
        await until(lambda: store.refused)
        with pytest.raises(errors.ServiceUnavailable, match="cannot save: disk full"):
            await manager.ask(submission("two"))
        manager._runner.report(record, step=3, metrics={"reward": 3.0}, roles={"ROLLOUT": 5})
        manager._runner.report(record, JobPhase.FINISHED)
        store.full = False
        ended = await manager.wait("job", WITHIN_S)
        assert (ended.step, ended.reward, ended.roles) == (3, 3.0, {"ROLLOUT": 5})
        kinds = [event.kind for event in await events(manager, "job", follow=False)]
        assert kinds[3:] == ["resized", "step"] * 3 + ["finished"]


async def test_returning_watchers_see_each_event_once(tmp_path):
    async def watch(manager, seen):
        """Leaves and comes back after each third page."""
        while not seen or not (seen[-1].name == "last" and seen[-1].phase.ended):
            after, count = (seen[-1].number if seen else 0), 0
            async for page in manager.watch(after=after):
                seen.extend(page)
                count += 1
                if count == 3 or (seen[-1].name == "last" and seen[-1].phase.ended):
                    break

    async with serving(tmp_path, MemoryRunner(steps=5, step_s=0.001, cpus=3)) as manager:
        logs = [[] for _ in range(10)]
        watchers = [asyncio.create_task(watch(manager, seen)) for seen in logs]
        for number in range(20):
            await manager.ask(submission(f"job-{number}"))
        await asyncio.gather(*(manager.wait(f"job-{number}", WITHIN_S) for number in range(20)))
        await manager.ask(submission("last"))
        await asyncio.gather(*watchers)
        for seen in logs:
            assert [event.number for event in seen] == list(range(1, len(seen) + 1))
        assert logs[0] == await events(manager, follow=False)


async def test_watcher_of_one_job_sees_no_events_of_others(tmp_path):
    async with serving(tmp_path, StillRunner()) as manager:
        quiet = await manager.ask(submission("quiet"))
        loud = await begin(manager, "loud")
        watching = asyncio.create_task(events(manager, "quiet"))
        for step in range(1, 50):
            manager._runner.report(loud, step=step)
        await until(lambda: manager.get("loud").step == 49)
        manager._runner.report(quiet, JobPhase.FINISHED)
        assert [event.kind for event in await watching] == ["submitted", "starting", "running", "finished"]


# -- a stop in each state ---------------------------------------------------------------------------------------------

STOPPED_WITHIN_S = 5.0


class SlowRunner(StillRunner):
    """Jobs that have not begun to run when they are asked to end, and end a while later."""

    def run(self, record, description):
        self.begun.append(record.run)

    def stop(self, record):
        asyncio.get_running_loop().call_later(0.1, self.report, record, JobPhase.STOPPED)


RUNNING = {"phase": JobPhase.RUNNING, "step": 3}
RESTARTING = {"phase": JobPhase.RUNNING, "restarts": 1, "activity": "restarting"}
REPORTS = {
    "queued": [],
    "starting": [],
    "running": [RUNNING],
    "restarting": [RUNNING, RESTARTING],
    "resuming": [RUNNING, RESTARTING, {"phase": JobPhase.STARTING, "activity": "resuming from the last commit"}],
    "ending": [RUNNING],
}


async def bring_to(manager, state):
    """Submit a job, and report until it is in one of the states of ``REPORTS``."""
    if state == "queued":
        await manager.ask(submission("first"))
    record = await manager.ask(submission())
    if state != "queued":
        await until(lambda: manager.get("job").phase is JobPhase.STARTING)
    for values in REPORTS[state]:
        manager._runner.report(record, **values)
        await until(lambda values=values: all(getattr(manager.get("job"), name) == values[name] for name in values))
    if state == "ending":
        assert (await manager.ask(stopping(manager))).phase is JobPhase.STOPPING


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("state", REPORTS)
@pytest.mark.parametrize("is_restarted", [False, True], ids=["same_service", "restarted_service"])
async def test_job_is_stopped_within_five_seconds_from_any_state(tmp_path, state, hard, is_restarted):
    async def stop_in_time(manager):
        with within(STOPPED_WITHIN_S):
            record = await manager.ask(stopping(manager, hard=hard))
            assert record.phase is (JobPhase.STOPPED if state == "queued" else JobPhase.STOPPING)
            assert (await manager.wait("job", STOPPED_WITHIN_S)).phase is JobPhase.STOPPED

    async with serving(tmp_path, SlowRunner(cpus=1)) as manager:
        await bring_to(manager, state)
        if not is_restarted:
            await stop_in_time(manager)
    if is_restarted:
        async with serving(tmp_path, MemoryRunner(step_s=60, cpus=1)) as manager:
            await stop_in_time(manager)


async def test_a_stop_does_not_reach_the_next_job_of_a_name(tmp_path):
    async with serving(tmp_path, StillRunner()) as manager:
        old = await manager.ask(submission(owner="mallory"))
        manager._runner.report(old, JobPhase.FINISHED)
        await manager.wait("job", WITHIN_S)
        stop = stopping(manager)  # as it was checked
        new, refused = await asyncio.gather(
            manager.ask(submission(token="another", owner="ann")), manager.ask(stop), return_exceptions=True
        )
        assert isinstance(refused, errors.CallError) and "a new job has taken the name 'job'" in str(refused)
        await until(lambda: manager.get("job").phase is JobPhase.RUNNING)
        assert manager.get("job").run == new.run


async def test_an_ended_job_keeps_no_description(tmp_path):
    async with serving(tmp_path) as manager:
        record = await manager.ask(submission())
        await manager.wait("job", WITHIN_S)
        with pytest.raises(errors.JournalCorrupt, match="no description"):
            manager._store.description(record.run)


async def test_nan_and_infinity_are_read_back(tmp_path):
    async with serving(tmp_path, StillRunner()) as manager:
        record = await begin(manager)
        manager._runner.report(record, step=1, metrics={"loss": float("nan"), "reward": float("inf")})
        await until(lambda: manager.get("job").step == 1)
    async with serving(tmp_path, StillRunner()) as manager:
        record = manager.get("job")
        assert replace(record, reward=0.0) == replace(manager.list_jobs()[0], reward=0.0)
        (event,) = [event for event in await events(manager, follow=False) if event.kind == "step"]
        assert set(event.metrics) == {"loss", "reward"}


@pytest.mark.parametrize("page", [1, 2, 1000])
async def test_events_on_disk_come_in_pages_of_any_size(tmp_path, monkeypatch, page):
    async with serving(tmp_path, MemoryRunner(steps=3)) as manager:
        await manager.ask(submission())
        await manager.wait("job", WITHIN_S)
        recent = await events(manager, follow=False)
    monkeypatch.setattr(manager_module, "_PAGE", page)
    async with serving(tmp_path) as manager:
        assert await events(manager, follow=False) == await events(manager, "job", follow=False) == recent
        assert await events(manager, "job", after=2) == recent[2:]


async def test_capacity_is_read_again_after_an_error(tmp_path):
    class Growing(StillRunner):
        looks = 0

        async def capacity(self):
            self.looks += 1
            if self.looks == 2:
                raise ConnectionError("Ray is away")
            return {"cpu": 1.0 if self.looks == 1 else 8.0}

    manager = JobManager(SqliteJobStore(tmp_path), Growing(), capacity_every_s=0.01)
    await manager.start()
    await manager.ask(submission(resources={"cpu": 4.0}))
    await until(lambda: manager.get("job").phase is JobPhase.RUNNING)
    await manager.close()
