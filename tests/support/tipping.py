# SPDX-License-Identifier: Apache-2.0
"""An environment that rewards the first of two turns, and an algorithm that keeps what it was given."""

from dataclasses import dataclass
from typing import ClassVar

from dlrover.python.rl.algorithm.ppo import PPO


async def step(state, action, extra_info):
    again = extra_info.get("again", False)
    next_state = None if again else f"{state}{action} more "
    info = {**extra_info, "again": True}
    return {"next_state": next_state, "reward": 0.0 if again else 1.0, "done": again, "extra_info": info}


@dataclass(frozen=True)
class Kept(PPO):
    """PPO without discount, whose returns are the rewards still to come."""

    annotated: ClassVar[list] = []
    lam: float = 1.0
    whiten: bool = False

    def annotate(self, rows):
        self.annotated.append(super().annotate(rows))
        return self.annotated[-1]
