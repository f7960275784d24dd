# SPDX-License-Identifier: Apache-2.0
"""The runner of a service on Ray, without Ray: a job that is to be ended is ended, whatever fails meanwhile."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.service import ray_runner
from dlrover.python.rl.service.ray_runner import RayJobRunner, _Driven


@pytest.fixture
def driven():
    return _Driven(SimpleNamespace(run="r1", name="job", reason="stopped", hard=False), SimpleNamespace())


def test_what_fails_while_a_job_is_ended_is_tried_again_and_leaves_no_task(driven, monkeypatch):
    swept = []

    def sweep(name):
        swept.append(name)
        if len(swept) < 3:
            raise RuntimeError("the GCS is away")
        runner._driven.pop("r1")

    async def scenario():
        nonlocal runner
        runner = RayJobRunner(grace_s=0.01)
        runner._driven["r1"] = driven
        runner.stop(driven.record)
        async with asyncio.timeout(10):
            await driven.tasks[0]
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    runner = None
    monkeypatch.setattr(ray_runner, "sweep", sweep)
    monkeypatch.setattr(ray_runner, "_AGAIN_S", 0.01)
    asyncio.run(scenario())
    assert swept == ["job"] * 3


def test_a_job_that_ends_within_the_grace_leaves_no_task(driven):
    async def scenario():
        runner = RayJobRunner(grace_s=60.0)
        runner._driven["r1"] = driven
        runner.stop(driven.record)
        await asyncio.sleep(0.01)
        driven.tasks[0].cancel()  # as the end of the run does
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


@pytest.mark.parametrize(("run", "goes_on"), [("r1", True), ("r0", False), (None, False)])
def test_a_run_goes_on_with_what_it_began_itself_and_with_nothing_else_in_its_folder(driven, monkeypatch, run, goes_on):
    job = load_job_text("{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A}}}", "job")
    begun = []

    async def no_master(name):
        return None

    async def start(driven, job):
        begun.append(job.checkpoint.resume)

    owner = None if run is None else SimpleNamespace(run=run, state="running")
    monkeypatch.setattr(ray_runner, "_described", lambda record, description: job)
    monkeypatch.setattr(ray_runner, "find_master", no_master)
    monkeypatch.setattr(ray_runner, "newest_owner", lambda folder: owner)
    monkeypatch.setattr(ray_runner, "sweep", lambda name: None)
    runner = RayJobRunner()
    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_observed", lambda *arguments, **more: None)
    asyncio.run(runner._find_or_start(driven, 0))
    assert begun == ["latest" if goes_on else "never"]
