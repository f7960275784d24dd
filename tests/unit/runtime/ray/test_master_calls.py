# SPDX-License-Identifier: Apache-2.0
"""Calls of a master from an event loop: their deadline, and their end together with the answer."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from dlrover.python.rl.common.errors import MasterLost
from dlrover.python.rl.runtime.ray.processes.actors import MasterCalls


def calls_that_answer(answer):
    return MasterCalls(SimpleNamespace(follow=SimpleNamespace(remote=lambda: answer)))


def test_a_call_that_is_cancelled_as_its_answer_comes_is_cancelled():
    """Who follows a master asks again and again: one lost cancellation, and it goes on for ever."""

    async def scenario():
        answer = asyncio.get_running_loop().create_future()
        following = asyncio.create_task(calls_that_answer(answer).call("follow", timeout_s=60.0))
        await asyncio.sleep(0.01)
        answer.set_result("update")
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following

    asyncio.run(scenario())


def test_a_master_that_does_not_answer_in_time_is_lost():
    async def scenario():
        answer = asyncio.get_running_loop().create_future()
        with pytest.raises(MasterLost, match="did not answer within 0.01 s"):
            await calls_that_answer(answer).call("follow", timeout_s=0.01)
        assert answer.cancelled()

    asyncio.run(scenario())
