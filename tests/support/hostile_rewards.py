# SPDX-License-Identifier: Apache-2.0
"""Environments and a reward function that do their worst, to some of the samples: by the bytes of what was written."""

import asyncio
import os
import threading
import time


def lot(text: str, of: int) -> int:
    """A number below ``of`` that depends on the text alone."""
    return sum(text.encode()) % of


async def reset(extra_info):
    if extra_info["seed"] % 7 == 3:
        raise OSError("no room for this game")
    return f"game {extra_info['seed']}: "


async def step(state, action, extra_info):
    match lot(action, 16):
        case 0:
            raise RuntimeError("out of order")
        case 1:
            return None
        case 2:
            return {"next_state": "x" * 10_000_000, "reward": 0.0}
        case 3:
            await asyncio.sleep(600)
        case 4:
            return {"next_state": state, "reward": 0.0, "extra_info": {"lock": threading.Lock()}}
        case 5:
            return {"next_state": state, "reward": "much"}
    return await calm(state, action, extra_info)


async def calm(state, action, extra_info):
    """A step without a fault."""
    done = "again" in extra_info
    next_state = f"{state}{action} more " if lot(action, 2) else "something else "
    info = {**extra_info, "again": True}
    return {"next_state": None if done else next_state, "reward": lot(action, 5) / 4, "done": done, "extra_info": info}


async def close(extra_info):
    if extra_info["seed"] % 5 == 2:
        await asyncio.sleep(600)


class Bombs:
    """A step that no interpreter survives: games beside it are lost, too."""

    episodes = 4

    def step(self, state, action, extra_info):
        if lot(action, 48) == 3:
            return 9**9**9
        if lot(action, 48) == 4:
            os._exit(3)
        return {"next_state": None, "reward": lot(action, 5) / 4, "done": True}


def reward(completion, answer, extra_info):
    match lot(completion, 16):
        case 0:
            raise RuntimeError("out of order")
        case 1:
            return None
        case 2:
            return "x" * 10_000_000
        case 3:
            time.sleep(600)
        case 4:
            return 9**9**9
        case 5:
            os._exit(3)
    return lot(completion, 5) / 4


class Calm:
    """Games that end after two turns, of which some are two sequences."""

    async def reset(self, extra_info):
        return f"game {extra_info['seed']}: "

    step = staticmethod(calm)
