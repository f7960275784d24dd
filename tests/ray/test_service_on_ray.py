# SPDX-License-Identifier: Apache-2.0
"""The service's manager over jobs on real Ray: they do not notice when it ends, and are found by its next process."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import MasterLost
from dlrover.python.rl.common.names import master_name
from dlrover.python.rl.master.client import on_ray
from dlrover.python.rl.runtime.ray.processes.actors import end, find
from dlrover.python.rl.service import ray_runner
from dlrover.python.rl.service.jobs.records import JobDescription, JobPhase, JobRecord, StopJob, SubmitJob
from dlrover.python.rl.service.jobs.store import SqliteJobStore
from dlrover.python.rl.service.manager import JobManager
from dlrover.python.rl.service.ray_runner import RayJobRunner
from tests.ray.durable_jobs import wait_for
from tests.ray.service_jobs import job_text

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

WITHIN_S = 60.0


@asynccontextmanager
async def serving(folder):
    manager = JobManager(SqliteJobStore(folder / "state"), RayJobRunner())
    await manager.start()
    try:
        yield manager
    finally:
        await manager.close()


def submission(name, text):
    description = JobDescription(text, folder=str(Path(__file__).parents[2]))
    job = JobRecord(name, "", "ann", f"token-{name}", resources={"cpu": 2.0}, roles={"ACTOR": 1})
    return SubmitJob(job, description)


def run(body):
    asyncio.run(asyncio.wait_for(body, 3 * WITHIN_S))


async def until(condition, within_s=WITHIN_S):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_job_is_run_left_found_again_and_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def body():
        async with serving(tmp_path) as manager:
            await manager.ask(submission("served", job_text(tmp_path / "notes", steps=60, step_s=0.1)))
            await until(lambda: manager.get("served").step >= 2)
            left = manager.get("served").step
        async with serving(tmp_path) as manager:
            await until(lambda: manager.get("served").step > left)
            ended = await manager.wait("served", WITHIN_S)
            assert (ended.phase, ended.step, ended.total_steps, ended.restarts) == (JobPhase.FINISHED, 60, 60, 0)
            events = [event async for page in manager.watch("served", follow=False) for event in page]
            assert [event.step for event in events if event.kind == "step"] == list(range(1, 61))
            assert events[-1].metrics == {} and events[-2].metrics["reward"] == sum(range(1, 61))
            assert Path(ended.results).parent == tmp_path / "runs" / "served"
        assert (tmp_path / "notes").read_text() == "started\n"
        assert find(master_name("served")) is None

    run(body())


def test_a_master_that_was_launched_and_not_started_is_started_by_the_next_process(tmp_path, monkeypatch):
    """Pretend that the service was killed in between."""
    monkeypatch.chdir(tmp_path)
    launched = []

    def unanswered(make_call, timeout_s):
        launched.append(make_call)
        raise MasterLost("the service is killed here")

    async def body():
        with monkeypatch.context() as patch:
            patch.setattr(on_ray, "ask", unanswered)
            patch.setattr(ray_runner, "_REVIVALS", 0)
            patch.setattr(RayJobRunner, "_end_all", lambda *_: asyncio.sleep(WITHIN_S))
            async with serving(tmp_path) as manager:
                await manager.ask(submission("unbegun", job_text(tmp_path / "notes", steps=3)))
                await until(lambda: launched)
        async with serving(tmp_path) as manager:
            ended = await manager.wait("unbegun", WITHIN_S)
            assert (ended.phase, ended.step) == (JobPhase.FINISHED, 3)
        assert (tmp_path / "notes").read_text() == "started\n"

    run(body())


def test_a_job_is_stopped_within_five_seconds_from_each_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def stopped(manager, name, phase, hard):
        await manager.ask(submission(name, job_text(tmp_path / name, steps=10_000)))
        await until(lambda: manager.get(name).phase is phase)
        began_s = time.monotonic()
        await manager.ask(StopJob(name, manager.get(name).run, "by the test", hard))
        ended = await manager.wait(name, WITHIN_S)
        assert ended.phase is JobPhase.STOPPED, ended
        assert time.monotonic() - began_s < 5.0
        await until(lambda: find(master_name(name)) is None, 10)

    async def body():
        async with serving(tmp_path) as manager:
            await stopped(manager, "s-starting", JobPhase.STARTING, False)
            await stopped(manager, "s-running", JobPhase.RUNNING, False)
            await stopped(manager, "s-hard", JobPhase.RUNNING, True)

    run(body())


def test_a_job_is_stopped_within_five_seconds_while_its_master_takes_long_to_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launched, ask = threading.Event(), on_ray.ask

    def slow(request, timeout_s):
        launched.set()
        wait_for(lambda: find(master_name("slow")) is None, WITHIN_S)
        return ask(request, timeout_s)

    monkeypatch.setattr(on_ray, "ask", slow)

    async def body():
        async with serving(tmp_path) as manager:
            await manager.ask(submission("slow", job_text(tmp_path / "notes", steps=10_000)))
            await until(launched.is_set)
            began_s = time.monotonic()
            await manager.ask(StopJob("slow", manager.get("slow").run, "by the test"))
            assert (await manager.wait("slow", WITHIN_S)).phase is JobPhase.STOPPED
            assert time.monotonic() - began_s < 5.0
        assert not (tmp_path / "notes").exists()

    run(body())


@pytest.mark.slow
def test_a_job_whose_master_is_lost_goes_on_from_its_last_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def body():
        async with serving(tmp_path) as manager:
            await manager.ask(submission("lost", job_text(tmp_path / "notes", steps=40, step_s=0.1)))
            await until(lambda: manager.get("lost").step >= 5)
            end(find(master_name("lost")))
            ended = await manager.wait("lost", WITHIN_S)
            assert (ended.phase, ended.step) == (JobPhase.FINISHED, 40), ended
            assert ended.reward == sum(range(1, 41))

    run(body())


def test_a_job_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def body():
        async with serving(tmp_path) as manager:
            await manager.ask(submission("wrong", job_text(tmp_path / "no-such-folder" / "notes")))
            ended = await manager.wait("wrong", WITHIN_S)
            assert (ended.phase, ended.cause) == (JobPhase.FAILED, "user_error"), ended
            assert "FileNotFoundError" in ended.detail
            await manager.ask(submission("unknown", job_text("x").replace("PacedTrainer", "PacedTrainr")))
            ended = await manager.wait("unknown", WITHIN_S)
            assert ended.phase is JobPhase.FAILED and "PacedTrainr" in ended.detail and "PacedTrainer" in ended.detail

    run(body())
