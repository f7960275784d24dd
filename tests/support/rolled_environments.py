# SPDX-License-Identifier: Apache-2.0
"""Environments that rollouts are tested with; each habit is asked for by the row's ``extra_info``."""

import asyncio
import threading

from tests.support.user_environments import HABITS

seen = []
"""What was called, with what."""

asleep = []
"""How many slept at a time, at the beginning of each nap."""
napping = set()


async def reset(extra_info):
    seen.append(("reset", dict(extra_info)))
    habit = extra_info.get("reset")
    if habit == "raise":
        raise KeyError("no such game")
    extra_info["number"] = extra_info.get("seed", 0)
    return f"game {extra_info['seed']}: " if "seed" in extra_info else habit


async def step(state, action, extra_info):
    seen.append(("step", state, action, dict(extra_info)))
    turns = extra_info.get("turns", 0) + 1
    if "nap" in extra_info:
        napping.add(key := object())
        asleep.append(len(napping))
        await asyncio.sleep(extra_info["nap"])
        napping.discard(key)
    habit = extra_info.get("habit")
    if habit in HABITS:
        return HABITS[habit](state)
    if habit == "sleep":
        await asyncio.sleep(600)
    next_state = "another " if habit == "unrelated" else f"{state}{action}seen "
    if habit == "long":
        next_state = state + action + "x" * 4000
    done = turns >= extra_info.get("until", 2)
    return {
        "next_state": None if done else next_state,
        "reward": extra_info["rewards"][turns - 1] if "rewards" in extra_info else float(turns) / 4,
        "score": float(done),
        "done": done,
        "extra_info": {**extra_info, "turns": turns},
    }


async def close(extra_info):
    seen.append(("close", dict(extra_info)))
    if extra_info.get("close") == "late":
        await asyncio.sleep(600)


async def shutdown():
    seen.append(("shutdown",))


class Pool:
    """Two worlds; one that is closed late keeps others waiting."""

    episodes = 2

    def __init__(self, size=2):
        self._free, self._lock = set(range(size)), threading.Lock()

    def reset(self, extra_info):
        with self._lock:
            extra_info["world"] = self._free.pop()  # A KeyError if a third one plays.
        return

    def step(self, state, action, extra_info):
        return {"next_state": state + action + "on ", "reward": 1.0, "done": extra_info.get("ends", False)}

    def close(self, extra_info):
        with self._lock:
            self._free.add(extra_info["world"])
