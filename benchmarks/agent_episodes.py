# SPDX-License-Identifier: Apache-2.0
"""The price of an episode of an agent, many at a time: ``python -m benchmarks.agent_episodes [EPISODES TURNS]``.

The engine is a script that says four tokens, so that what remains is the endpoint, its sessions, and the client, which
runs in the same process as an ``httpx.AsyncClient``. All episodes are open before the first one may end."""

import asyncio
import resource
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.agent_clients import Client, acting, user
from tests.support.scripted import groups


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def measure(episodes: int, turns: int) -> dict[str, float]:
    """Return seconds, processor milliseconds per turn, and resident KB per open episode."""
    opened, grown_mb, everybody = 0, 0.0, asyncio.Event()
    before_mb = resident_mb()

    async def run(client: Client, row: dict[str, Any]) -> float:
        nonlocal opened, grown_mb
        messages = [user("begin")]
        for turn in range(turns):
            message, _ = await client.chat(*messages)
            messages += [message, user(f"turn {turn}")]
        opened += 1
        if opened == episodes:
            grown_mb = resident_mb() - before_mb
            everybody.set()
        await everybody.wait()
        return 1.0

    with acting(lambda *_: "yes", run, patience_s=600.0) as rolled:
        rolled.scheduler._max_generating = episodes
        begun_s, processor_s = time.perf_counter(), time.process_time()
        rows = rolled.fetch(groups(*[{}] * episodes))
        seconds, used_s = time.perf_counter() - begun_s, time.process_time() - processor_s
    assert rows.objects("error") == [None] * episodes
    return {
        "seconds": seconds,
        "processor_ms_per_turn": 1000 * used_s / (episodes * turns),
        "resident_kb_per_episode": 1024 * grown_mb / episodes,
    }


if __name__ == "__main__":
    count, length = map(int, sys.argv[1:] or (1000, 2))
    measure(10, length)  # imports
    for name, value in measure(count, length).items():
        sys.stdout.write(f"{name}: {value:.2f}\n")
