# SPDX-License-Identifier: Apache-2.0
"""Test functions that are coroutine functions: a ``conftest.py`` that imports the hook lets its folder have them."""

import asyncio
import inspect

import pytest

WITHIN_S = 30.0


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
