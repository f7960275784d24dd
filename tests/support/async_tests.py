# SPDX-License-Identifier: Apache-2.0
"""Test functions that are coroutine functions. What they wait for has a deadline."""

import asyncio
import inspect

import pytest

WITHIN_S = 180.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a coroutine function to its end in a new event loop, within a deadline."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def run():
        async with asyncio.timeout(WITHIN_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True


async def until(condition, within_s=30.0):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
