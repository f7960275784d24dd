# SPDX-License-Identifier: Apache-2.0
"""An environment whose answers take long now and then, as tools' and sandboxes' do."""

import asyncio
import zlib
from typing import Any

_WAITS_S = ((0.80, 0.02), (0.97, 0.2), (1.00, 2.0))
"""Up to which share of the actions, and for how long."""


async def step(state: str, action: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Wait as long as the action's text says, and reward the share of it that is plain ASCII."""
    draw = zlib.crc32(action.encode()) / 2**32
    await asyncio.sleep(next(wait_s for share, wait_s in _WAITS_S if draw < share))
    reward = sum(character.isascii() for character in action) / max(len(action), 1)
    return {"next_state": None, "reward": reward, "score": reward, "done": True, "extra_info": extra_info}
