# SPDX-License-Identifier: Apache-2.0
"""Completions from a prompt that opens thoughts, as far as their rewards."""

import pytest

from dlrover.python.rl.recipe.base.config import RewardConfig
from dlrover.python.rl.recipe.roles.reward import RewardWorkload
from tests.support import chat_environments
from tests.support.scripted import groups, rolling, texts

OPENING = chat_environments.TEMPLATE.replace("assistant\n{% if", "assistant\n<think>\n{% if")
PROMPT = [{"role": "user", "content": "2+5?"}]
CALL = '<tool_call>{"name": "add", "arguments": {"first": 2}}</tool_call>'
COMPLETIONS = [  # with reward.thoughts: ignored, and scored, which commit d3d8fc39 gave
    (r"Is it \boxed{7}? I check", 0.0, 1.0),
    (r"Is it \boxed{7}?</think>It is 6.", 0.0, 1.0),
    (r"Is it \boxed{6}?</think>It is 7.", 1.0, 0.0),
]


def score(rollouts, **settings):
    workload = RewardWorkload(None, {})
    workload.init_verifier(RewardConfig(function="exact", timeout_s=20.0, workers=1, **settings))
    try:
        return workload.score(rollouts).dense("reward").tolist()
    finally:
        workload.close()


def test_reward_thoughts_decides_whether_thoughts_are_scored():
    with rolling(lambda _, index: COMPLETIONS[index][0]) as rolled:
        rolled.engine.tokenizer.chat_template = OPENING
        rollouts = rolled.fetch(groups({}, prompt=PROMPT), samples=len(COMPLETIONS))
    assert rollouts.objects("think_prefix") == ["<think>\n"] * 3
    assert rollouts.objects("completion") == [text for text, _, _ in COMPLETIONS]
    assert score(rollouts) == [reward for _, reward, _ in COMPLETIONS]
    assert score(rollouts, thoughts="scored") == [reward for _, _, reward in COMPLETIONS]


@pytest.mark.parametrize("prompt", [PROMPT, "2+5? <think>"], ids=["messages", "text"])
@pytest.mark.parametrize(
    ("actions", "reward", "turns"),
    [
        ((f"Perhaps {CALL}, so 7",), 0.0, 1),  # d3d8fc39: the call is made
        ((f"Perhaps {CALL}.</think>{CALL}", "So?</think>7"), 1.0, 2),  # d3d8fc39: two calls are made
    ],
)
def test_tools_of_an_opened_thought_makes_no_draft(prompt, actions, reward, turns):
    options, remaining = {"tools": {"add": "tests.support.chat_environments:add"}, "judge": "exact"}, iter(actions)
    with rolling(lambda *_: next(remaining), "tools", options=options) as rolled:
        rolled.engine.tokenizer.chat_template, rolled.max_new_tokens = OPENING, 200
        rollouts = rolled.fetch(groups({}, prompt=prompt))
    assert (rollouts.dense("reward").sum(), rollouts.dense("turns")[0]) == (reward, turns)
    assert "".join(texts(rollouts, "action_mask")) == "".join(f"{action}<|im_end|>" for action in actions)
