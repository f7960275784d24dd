# SPDX-License-Identifier: Apache-2.0
"""Environments loaded by name; the action selects what most of them do."""

import asyncio
import os
import threading
import time
from contextlib import suppress

log = []


async def reset(extra_info):
    extra_info["began"] = True
    if extra_info.get("reset") == "raise":
        raise KeyError("no such game")
    if extra_info.get("reset") == "hang":
        await asyncio.sleep(60)
    return extra_info.get("first", "state ")


async def step(state, action, extra_info):
    if action in HABITS:
        return HABITS[action](state)
    if action == "sleep":
        await asyncio.sleep(60)
    if action == "deaf":
        await _deaf()
    if action == "nap":
        await asyncio.sleep(0.2)
    done = action == "done"
    turns = extra_info.get("turns", 0) + 1
    return {
        "next_state": None if done else f"{state}{action}seen ",
        "reward": 1.0,
        "score": 0.5,
        "done": done,
        "extra_info": {**extra_info, "turns": turns, "pid": os.getpid(), "action": action},
    }


async def close(extra_info):
    log.append(dict(extra_info))
    if extra_info.get("close") == "raise":
        raise OSError("late")


async def shutdown():
    log.append("shutdown")


async def _deaf():
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


def _raise(state):
    raise RuntimeError("out of order")


HABITS = {
    "raise": _raise,
    "none": lambda state: None,
    "fallthrough": lambda state: {"reward": 0.0, "done": False},
    "nan": lambda state: {"next_state": "x", "reward": float("nan")},
    "misspelt": lambda state: {"next_sate": "x", "reward": 0.0},
    "huge": lambda state: {"next_state": "x" * 10_000_000, "reward": 0.0},
    "exit": lambda state: os._exit(3),
    "bomb": lambda state: 9**9**9,  # in C, without releasing the interpreter
    "object": lambda state: {"next_state": "x", "reward": 0.0, "extra_info": {"lock": threading.Lock()}},
    "short": lambda state: {"next_state": state + "shortseen", "reward": 1},
}


class Counting:
    """Sync calls, options, a limit."""

    episodes = 2

    def __init__(self, start=0):
        self.start = start

    def reset(self, extra_info):
        return str(self.start)

    def step(self, state, action, extra_info):
        if action == "hang":
            time.sleep(60)
        value = int(state) + int(action)
        return {"next_state": str(value), "reward": value, "done": value > 9}


class Without:
    def stpe(self):
        """A misspelt ``step``."""


class TooFew:
    def step(self, state, action):
        """It takes no extra_info."""


class TooMany:
    def step(self, state, action, extra_info=None):
        """It takes what it is called with."""

    @staticmethod
    def reset(seed, extra_info):
        """It is called with extra_info only."""
