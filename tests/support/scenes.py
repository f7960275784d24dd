# SPDX-License-Identifier: Apache-2.0
"""An environment of states that never continue each other: a sample of two turns is two rows. Some fail in the second;
rewards are not the scores that people read."""

from tests.support.hostile_rewards import lot


async def reset(extra_info):
    return f"scene {extra_info['seed'] % 9}: "


async def step(state, action, extra_info):
    if "again" not in extra_info:
        going = {"next_state": "next scene: ", "done": False, "extra_info": {**extra_info, "again": True}}
        return {**going, "reward": lot(action, 3) / 2, "score": 0.0}
    if lot(action, 5) == 0:
        raise RuntimeError("the curtain fell")
    return {"next_state": None, "reward": lot(action, 4) / 4, "score": float(lot(action, 2)), "done": True}
