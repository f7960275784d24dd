# SPDX-License-Identifier: Apache-2.0
"""An environment that answers a search, and judges an answer."""

PASSAGES = {"China": "Beijing is the capital of China.", "France": "Paris is the capital of France."}


async def step(state: str, action: str, extra_info: dict) -> dict:
    response = {"next_state": None, "reward": 0.0, "score": 0.0, "done": True, "extra_info": extra_info}
    if "search:" in action:
        found = [passage for country, passage in PASSAGES.items() if country in action]
        return {**response, "next_state": state + action + "\n" + " ".join(found) + "\n", "done": False}
    right = float(extra_info["answer"] in action)
    return {**response, "reward": right, "score": right}
