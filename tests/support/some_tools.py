# SPDX-License-Identifier: Apache-2.0
"""Tools and a judge to test with."""

import asyncio

from dlrover.python.rl.common.errors import EnvironmentFailed

calls = []


def add(first: int, second: int = 1) -> int:
    calls.append((first, second))
    return first + second


async def search(query):
    await asyncio.sleep(0)
    return {"found": f"{query}: ü"}


def long(size=10_000):
    return "x" * size


def gone():
    raise EnvironmentFailed("the server of the tool is gone")


def judge(completion, answer, extra_info):
    return float(completion.endswith(answer or "nothing")) - 0.25 * extra_info["tool_calls"]


def note(text):
    calls.append(text)
    return f"noted {text}"
