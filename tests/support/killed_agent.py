# SPDX-License-Identifier: Apache-2.0
"""An agent that kills its process in its second turn, as often as its row says."""

import os
import signal
from pathlib import Path

import httpx


def step(state, action, extra_info):
    def chat(*messages):
        body = {"model": "policy", "messages": [{"role": "user", "content": "one"}, *messages]}
        answer = httpx.post(f"{state}/chat/completions", json=body, headers=headers, timeout=60.0)
        return answer.json()["choices"][0]["message"]

    headers, starts = {"authorization": f"Bearer {action}"}, Path(extra_info["starts"])
    first = chat()
    with starts.open("a") as file:
        file.write(first["content"] + "\n")
    if len(starts.read_text().splitlines()) <= extra_info["kills"]:
        os.kill(os.getpid(), signal.SIGKILL)
    chat(first, {"role": "user", "content": "two"})
    return {"reward": 1.0, "done": True}
