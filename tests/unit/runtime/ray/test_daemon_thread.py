# SPDX-License-Identifier: Apache-2.0
"""Calls in threads of their own: what they give, and that they hold nothing up."""

import asyncio
import subprocess
import sys
import threading

import pytest

from dlrover.python.rl.runtime.ray.cluster.nodes import in_daemon_thread


def test_a_result_and_an_error_come_to_the_loop():
    async def scenario():
        assert await in_daemon_thread(divmod, 7, 3) == (2, 1)
        with pytest.raises(ZeroDivisionError):
            await in_daemon_thread(divmod, 7, 0)

    asyncio.run(scenario())


def test_a_call_that_was_given_up_ends_in_silence():
    ended = threading.Event()

    async def scenario():
        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        future = in_daemon_thread(lambda: ended.wait(10))
        future.cancel()
        ended.set()
        await asyncio.sleep(0.05)
        assert errors == []

    asyncio.run(scenario())


def test_a_call_that_does_not_end_does_not_keep_the_process_from_ending():
    code = (
        "import asyncio, time\n"
        "from dlrover.python.rl.runtime.ray.cluster.nodes import in_daemon_thread\n"
        "async def main():\n"
        "    in_daemon_thread(time.sleep, 600)\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
