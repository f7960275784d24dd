# SPDX-License-Identifier: Apache-2.0
"""The environment of RL2's README, made runnable: searches until it answers."""

import asyncio


def parse_action_type(action: str) -> str:
    return "search" if action.startswith("<search>") else "answer"


def parse_query(action: str) -> str:
    return action.removeprefix("<search>").partition("</search>")[0]


async def search_result(query: str) -> str:
    await asyncio.sleep(0)
    return f"\n<information>{query} is 7</information>\n"


def parse_pred(action: str) -> str:
    return action.removeprefix("<answer>").partition("</answer>")[0]


def is_equivalent(pred: str, answer: str) -> bool:
    return pred.strip() == answer


async def step(state: str, action: str, extra_info: dict) -> dict:
    action_type = parse_action_type(action)
    env_response = {"next_state": None, "reward": 0.0, "score": 0.0, "done": False, "extra_info": extra_info}
    if action_type == "search":
        passage = await search_result(parse_query(action))
        return {**env_response, "next_state": state + action + passage}
    reward = float(is_equivalent(parse_pred(action), extra_info["answer"]))
    return {**env_response, "reward": reward, "score": reward, "done": True}
