# SPDX-License-Identifier: Apache-2.0
"""Thoughts earn nothing and call nothing."""

import asyncio
import json
import time

import pytest

from dlrover.python.rl.data.conversation import find_think_prefix
from dlrover.python.rl.data.model_text import ignore_thoughts, split_calls, split_thoughts
from dlrover.python.rl.environment.core.functions import load_function
from dlrover.python.rl.environment.core.gym_adapter import GymEnvironment
from dlrover.python.rl.environment.core.messages import make_assistant_message
from dlrover.python.rl.environment.core.scoring import Completed, RewardFunction, WeightedRewards
from dlrover.python.rl.environment.core.tools import ToolEnvironment
from tests.support import some_tools
from tests.support.manual_clock import within

ANSWERS = [  # completion, reference, reward where thoughts are scored, reward
    (r"<think>Is it \boxed{31}?</think>It is \boxed{46}.", "46", 1.0, 1.0),
    (r"<think>Is it \boxed{31}?</think>It is 46.", "31", 1.0, 0.0),
    (r"<think>Is it \boxed{31}? I check that once more", "31", 1.0, 0.0),
    (r"Is it \boxed{31}?</think>It is 46.", "31", 1.0, 0.0),
    (r"So it is \boxed{46}.", "46", 1.0, 1.0),
    ("<think>\\boxed{31}</think>Hm.\n<think>\\boxed{32}</think>It is 46.", "46", 0.0, 1.0),
    ("<think>\\boxed{31}</think>It is 46.\n<think>Or \\boxed{32}?", "32", 1.0, 0.0),
    ("<think>It may be `31`</think>`So` it is 46.", "46", 1.0, 1.0),
    (r"[THINK]\boxed{31}[/THINK]It is 46.", "46", 0.0, 1.0),
    (r"<reasoning>It may be \boxed{31}", "31", 1.0, 0.0),
    ("\n <think>\nI close with `</think>` later: \\boxed{31}", "31", 1.0, 0.0),
    (r"<think>a</think>The tag <think> opens thoughts, \boxed{46}.", "46", 1.0, 1.0),
    (r"It is \boxed{46}, and `</think>` would close thoughts.", "46", 1.0, 1.0),
]


@pytest.mark.parametrize("verifier", ["exact", "gsm8k", "math"])
@pytest.mark.parametrize(("completion", "reference", "scored", "expected"), ANSWERS)
def test_verifiers_score_the_answer_behind_thoughts(verifier, completion, reference, scored, expected):
    if verifier == "math":
        pytest.importorskip("math_verify")
    function = load_function(verifier)
    assert function(completion, reference, {}) == expected
    assert RewardFunction(function).on(Completed(completion, reference)) == expected
    assert RewardFunction(function).on(Completed(completion, reference, think_prefix=None)) == scored


PROGRAM, WRONG = "```python\nprint(int(input()) - 4)\n```", "```python\nprint(0)\n```"
SPLITS = "```python\nprint(len(input().split('</think>')[-1]) + 4)\n```"
PROGRAMS = [
    (f"<think>{PROGRAM}</think>I give up.", 0.0),
    (f"<think>{PROGRAM} or rather", 0.0),
    (f"<think>{WRONG}</think>{PROGRAM}", 1.0),
    (f"{PROGRAM}</think>I give up.", 0.0),
    (f"<think>{PROGRAM}</think>{WRONG}", 0.0),
    (f"<think>{WRONG}</think>{SPLITS}\nIt reads what follows `</think>`.", 1.0),
]


@pytest.mark.parametrize(("completion", "expected"), PROGRAMS)
def test_python_tests_runs_no_program_of_thoughts(completion, expected):
    reward = load_function("python_tests")(completion, None, {"tests": [{"input": "10", "output": "6"}]})
    assert reward == expected


def call(text):
    return "<tool_call>" + json.dumps({"name": "note", "arguments": {"text": text}}) + "</tool_call>"


A, B = call("a"), call("b")
ACTIONS = [  # action, calls, the episode ends
    (A, ["a"], False),
    (f"<think>Perhaps {A}. No.</think>It is 63.", [], True),
    (f"<think>Perhaps {A}. Rather b.</think>{B}", ["b"], False),
    (f"Perhaps {A}. No.</think>It is 63.", [], True),
    ("<think>No <tool_call> is needed.</think>It is 63.", [], True),
    (f"<think>I need a <tool_call> now.</think>{B}", ["b"], False),
    (f"<think>Perhaps {A} or", [], True),
    (f"<think>x</think>{A}\n<think>y</think>{B}", ["b"], False),
    (f"[THINK]Perhaps {A}[/THINK]It is 63.", [], True),
    ("No <tool_call> is needed: it is 63.", [], True),
    ("A call is between `<tool_call>` and `</tool_call>`; it is 63.", [], True),
    (f"I need a <tool_call> now.\n{B}", ["b"], False),
    ("<think>b?</think><tool_call>note(b)</tool_call>", ["error"], False),
]
ARGUMENTS = [  # arguments of the calls of an action
    ["ends with </tool_call>"], ["<tool_call>{}</tool_call>"], ["x </tool_call> y", "z"], ["opens <tool_call> only"],
    ["a </think> b"], ["<think>a</think>", "</tool_call>"], ['a "quoted" </tool_call>\n\\', "{[</tool_call>"],
    [{"deep": ["</tool_call>", {"</tool_call>": 1.5e-3}]}],
]  # fmt: skip


def take_step(action, state):
    """The calls made, errors as "error", and the step's result."""
    some_tools.calls.clear()
    environment = ToolEnvironment({"note": "tests.support.some_tools:note"}, "exact")
    action = make_assistant_message(action) if isinstance(state, list) else action
    step = asyncio.run(environment.step(state, action, {"answer": "63", "tool_calls": 0}))
    errors = str(step.next_state).removeprefix(str(state)).count("error: the call is not JSON: ")
    return some_tools.calls + ["error"] * errors, step


STATES = pytest.mark.parametrize("state", ["?", [{"role": "user", "content": "?"}]], ids=["text", "messages"])


@STATES
@pytest.mark.parametrize(("action", "calls", "ends"), ACTIONS)
def test_tools_makes_no_call_of_thoughts(state, action, calls, ends):
    requests, step = take_step(action, state)
    assert (requests, step.done) == (calls, ends)
    assert step.reward == float(ends and "63" in action)


@STATES
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_tools_reads_a_call_to_the_end_of_its_json(state, arguments):
    requests, step = take_step("\n".join(map(call, arguments)), state)
    assert requests == arguments
    assert not step.done


def test_tools_thoughts_opened_by_the_prompt_are_drafts():
    for prompt, calls in (("?", ["a"]), ("? <think>\n", [])):
        requests, step = take_step(f"Perhaps {A} or 63", prompt)
        assert (requests, step.done, step.reward) == (calls, not calls, 0.0)
    environment = ToolEnvironment({"note": "tests.support.some_tools:note"}, "exact", thoughts="scored")
    step = asyncio.run(environment.step("? <think>\n", "It is 63", {"answer": "63"}))
    assert (step.done, step.reward) == (True, 1.0)


def test_malformed_call_is_an_error_others_keep_their_ids():
    action = f"<think>{A}</think>{A}<tool_call>{{'b'}}</tool_call>{B}"
    message = make_assistant_message(action, turn=2)
    assert [item["id"] for item in message["tool_calls"]] == ["call00200", "call00202"]
    assert message["content"] == action
    requests, step = take_step(action, [{"role": "user", "content": "?"}])
    assert requests == ["a", "b", "error"]
    ids = [item.get("tool_call_id") for item in step.next_state]
    assert ids == ["call00000", None, "call00002"]
    whole = make_assistant_message(f"<think>{A}</think>I call {B}")
    assert (whole["content"], len(whole["tool_calls"])) == (f"<think>{A}</think>I call", 1)


@pytest.mark.parametrize(
    ("prompt", "prefix"),
    [("assistant\n<think>\n", "<think>\n"), ("Assistant: [THINK]", "[THINK]"), ("assistant\n<think>\n\n</think>\n", ""),
     ("Think between <think> and </think>.", ""), ("", "")],
)  # fmt: skip
def test_find_think_prefix_is_the_open_tag_at_the_end(prompt, prefix):
    assert find_think_prefix(prompt) == prefix
    assert split_thoughts("31", prefix) == (("", "31") if not prefix else (f"{prefix}31", None))


def length(completion):
    return float(len(completion))


async def later(completion, prompt):
    return float(len(completion))


@pytest.mark.parametrize(
    ("function", "rewards"),  # of finished thoughts, unfinished ones, and finished ones with reward.thoughts: scored
    [(length, [20.0, 5.0, 20.0]), (ignore_thoughts(length), [4.0, 0.0, 20.0]),
     (ignore_thoughts(later), [4.0, 0.0, 20.0]), (lambda completions, **_: map(len, completions), [20.0, 5.0, 20.0])],
)  # fmt: skip
def test_user_functions_get_thoughts_unless_decorated(function, rewards):
    weighted = WeightedRewards({"it": function}, {"it": 1.0})
    whole = Completed("<think>a?</think>four")
    samples = [whole._replace(completion="<think>a</think>four"), Completed("a? b?", think_prefix="<think>")]
    assert [reward.total for reward in weighted.now([*samples, samples[0]._replace(think_prefix=None)])] == rewards


async def test_game_gets_the_move_behind_thoughts():
    moves = []

    class World:
        reset = staticmethod(lambda seed: ("go", {}))
        step = staticmethod(lambda move: (moves.append(move) or "on", 0.0, False, False, {}))

    pool, info = GymEnvironment(World, 1), {}
    state = await pool.reset(info)
    await pool.step(state, "<think>left?</think>right", info)
    await pool.step(f"{state}<think>\n", "left?", info)
    assert moves == ["right", ""]


@pytest.mark.parametrize(
    "part",
    ["<tool_call>", "<tool_call>{", "<tool_call>{</tool_call>", '<tool_call>{"a":"</tool_call>', "x<tool_call>\n ",
     '{"a":[', "\n<think>", "</think>", "'</think>", "`"],
)  # fmt: skip
def test_hostile_text_is_split_in_linear_time(part):
    text = f"<think></think><tool_call>{part * 100_000}"
    with within(10, time.process_time):
        split_thoughts(text)
        split_calls(text)
