# SPDX-License-Identifier: Apache-2.0
"""An agent that kills its process in its second turn, as often as its row says."""

import os
import signal
from pathlib import Path

import httpx

from tests.support.agent_clients import Client


async def step(state, action, extra_info):
    async with httpx.AsyncClient(timeout=60.0) as http:
        client, starts = Client(state, action, http), Path(extra_info["starts"])
        first, _ = await client.chat("one")
        with starts.open("a") as file:
            file.write(first["content"] + "\n")
        if len(starts.read_text().splitlines()) <= extra_info["kills"]:
            os.kill(os.getpid(), signal.SIGKILL)
        await client.chat("one", first, "two")
    return {"reward": 1.0, "done": True}
