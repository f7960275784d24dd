# SPDX-License-Identifier: Apache-2.0
"""The runner of a service on Ray, without Ray: a job that is to be ended is ended, whatever fails meanwhile."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

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
