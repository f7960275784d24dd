# SPDX-License-Identifier: Apache-2.0
"""The ends of actors are noticed without asking them."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.core.generated.gcs_pb2 import ActorTableData
from ray.exceptions import ActorDiedError, ActorUnavailableError

from dlrover.python.rl.runtime.ray.cluster import api as module
from dlrover.python.rl.runtime.ray.cluster.api import RayClusterApi

ALIVE, DEAD = ActorTableData.ActorState.ALIVE, ActorTableData.ActorState.DEAD
ID = bytes(range(16))


class Handle:
    def __init__(self, *answers):
        self.state, self.pings, self.answers = ALIVE, 0, [None, *answers]
        self.dlrover_ping = SimpleNamespace(remote=self._ping)

    def _ping(self):
        self.pings += 1
        answered = asyncio.get_running_loop().create_future()
        answer = self.answers.pop(0)
        answered.set_result(True) if answer is None else answered.set_exception(answer)
        return answered

    def _get_local_state(self):
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.001)


def test_a_living_actor_is_asked_once():
    async def run():
        handle = Handle()
        waiting = asyncio.create_task(RayClusterApi().until_ended(handle))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert handle.pings == 1
        waiting.cancel()

    asyncio.run(run())


def test_each_learns_of_its_own_end_and_why():
    async def run():
        ends = RayClusterApi()
        broken, dead = ActorUnavailableError("its connection broke", ID), ActorDiedError()
        first, second = Handle(broken, dead), Handle(ActorDiedError())
        waiting = [asyncio.create_task(ends.until_ended(handle)) for handle in (first, second)]
        await asyncio.sleep(0.01)
        first.state = DEAD
        assert await asyncio.wait_for(waiting[0], 5) is dead
        assert not waiting[1].done()
        second.state = DEAD
        assert isinstance(await asyncio.wait_for(waiting[1], 5), ActorDiedError)

    asyncio.run(run())


def test_one_that_is_watched_after_all_others_have_ended_is_looked_at_too():
    async def run():
        ends = RayClusterApi()
        for _ in range(2):
            handle = Handle(ActorDiedError())
            handle.state = DEAD
            await asyncio.wait_for(ends.until_ended(handle), 5)
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_those_who_wait_hear_that_no_end_would_be_noticed():
    async def run():
        handle = Handle()
        handle.state = RuntimeError("Ray is not connected")
        with pytest.raises(RuntimeError, match="not connected"):
            await asyncio.wait_for(RayClusterApi().until_ended(handle), 5)

    asyncio.run(run())
