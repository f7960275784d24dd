# SPDX-License-Identifier: Apache-2.0
"""An environment of tools."""

import asyncio
import json
import time

import pytest

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.environment.core.functions import load_environment
from dlrover.python.rl.environment.core.messages import make_assistant_message
from dlrover.python.rl.environment.core.turns import Guard, Trajectory
from dlrover.python.rl.environment.sandbox.environment_process import IsolatedEnvironment
from tests.support import some_tools

WHERE = "dlrover.python.rl.environment.core.tools:ToolEnvironment"
TOOLS = {name: f"tests.support.some_tools:{name}" for name in ("add", "search", "long", "gone")}
OPTIONS = {"tools": TOOLS, "judge": "tests.support.some_tools:judge"}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(*actions, extra_info=None, **options):
    """An episode of these actions: what the policy saw behind each but the last, and what became of it."""

    async def play():
        guard = Guard(load_environment(WHERE, OPTIONS | options), 30.0)
        episode = await guard.reset("Q: ", {"answer": 5, **(extra_info or {})})
        seen = []
        for action in actions:
            state = episode.state
            await guard.step(episode, action)
            if episode.state is not None:
                assert episode.state.startswith(state + action)
                seen.append(episode.state[len(state + action) :])
        await guard.close(episode)
        return seen, episode

    return asyncio.run(asyncio.wait_for(play(), 60))


def response(text):
    return f"\n<tool_response>\n{text}\n</tool_response>\n"


@pytest.mark.feature(89)
def test_a_call_is_answered_and_the_answer_is_judged():
    seen, episode = played(f"I add: {call('add', first=2, second=3)}", "it is 5")
    assert seen == [response("5")]
    assert (episode.done, episode.reward, episode.score, episode.turns, episode.failure) == (True, 0.75, 0.75, 2, None)
    assert played("5")[1].reward == 1.0
    assert played("6")[1].reward == 0.0


def test_calls_are_async_or_not_several_in_an_action_and_need_not_be_closed_at_its_end():
    seen, episode = played(call("search", query="Beijing") + call("add", first=1), call("add", first=3)[:-13], "5")
    both = '{"found": "Beijing: ü"}\n</tool_response>\n<tool_response>\n2'
    assert seen == [response(both), response("4")]
    assert episode.extra_info["tool_calls"] == 3
    assert episode.reward == 0.25


def test_half_a_character_in_a_call_is_replaced_and_the_sample_goes_on():
    seen, episode = played(call("search", query="Bei\ud83d"), call("\ud83d"), "5")
    assert seen[0] == response('{"found": "Bei\ufffd: ü"}')
    assert "error: there is no tool '\ufffd'" in seen[1]
    assert (episode.failure, episode.reward) == (None, 0.5)
    message = make_assistant_message(call("search", query="Bei\ud83d"))
    assert message["tool_calls"][0]["function"]["arguments"] == {"query": "Bei\ufffd"}


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (call("ad", first=1), "error: there is no tool 'ad'; did you mean 'add'?"),
        (call("add", frist=1), "error: 'add' does not take these arguments: missing a required argument: 'first'"),
        (call("add", first=1, secnd=1), "got an unexpected keyword argument 'secnd'; did you mean 'second'?"),
        (call("add", first="x"), 'error: TypeError: can only concatenate str (not "int") to str'),
        ("<tool_call>add(1)</tool_call>", "error: the call is not JSON: "),
        ("<tool_call>" + "[" * 100_000, "error: the call is not JSON: "),
        ("<tool_call>[1]</tool_call>", 'error: a call is {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object, not list"),
        (
            '<tool_call>{"name": "add", "parameters": {}}</tool_call>',
            'error: a call is {"name": ..., "arguments": {...}}',
        ),
        (call("some_tools.add", first=1), "error: there is no tool 'some_tools.add'"),
    ],
)
def test_a_wrong_call_is_told_to_the_policy_and_the_sample_goes_on(action, told):
    some_tools.asked.clear()
    seen, episode = played(action, "5")
    assert told in seen[0]
    assert (episode.failure, episode.reward) == (None, 0.75)
    assert some_tools.asked in ([], [("x", 1)])


def test_a_tool_may_say_that_the_sample_has_failed():
    seen, episode = played(call("gone"), extra_info={"answer": "5"})
    assert seen == []
    assert episode.failure == "the server of the tool is gone"


def test_results_and_calls_are_limited():
    seen, _ = played(call("long"), "5", longest_result=7)
    assert seen == [response("xxxxxxx\n(cut: 7 of 10000 characters)")]
    one = call("add", first=1)
    seen, episode = played(one + one + one, f"{one} 5", max_calls=2)
    assert seen[0].count("2\n</tool_response>") == 2
    assert "error: no call is left: answer now" in seen[0]
    assert (episode.done, episode.reward) == (True, 0.5)


def test_an_action_full_of_openings_takes_no_time():
    began = time.monotonic()
    seen, _ = played("<tool_call>" * 300_000, "5")
    assert "the call is not JSON" in seen[0]
    assert time.monotonic() - began < 10


@pytest.mark.feature(87)
def test_a_sample_with_calls_is_one_sequence_in_which_responses_are_not_trained():
    turn = "<end>\n<user>{responses}<end>\n<assistant>"
    action = call("add", first=2)
    (seen,), _ = played(action, "5", turn=turn)
    assert seen == "<end>\n<user><tool_response>\n3\n</tool_response><end>\n<assistant>"
    trajectory = Trajectory(lambda text: list(text.encode()), "Q: ")
    for state, text in (("Q: " + action + seen, action), (None, "5")):
        trajectory.act(text, list(text.encode()), {"logprobs": [0.0] * len(text), "versions": [0] * len(text)})
        if state is not None:
            assert trajectory.observe(state)
    (sequence,) = trajectory.sequences
    assert bytes(sequence.tokens).decode() == f"Q: {action}{seen}5"
    by_policy = bytes(
        token for token, acted in zip(sequence.tokens, sequence.values["action_mask"], strict=True) if acted
    )
    assert by_policy.decode() == f"{action}5"


def test_it_runs_in_a_process_of_its_own():
    async def play():
        environment = IsolatedEnvironment(WHERE, OPTIONS)
        try:
            info = {"answer": "3"}
            assert await environment.reset(info) is None
            step = await environment.step("Q: ", call("add", first=2), info)
            return step, await environment.step(step.next_state, "3", step.extra_info)
        finally:
            await environment.shutdown()

    first, last = asyncio.run(asyncio.wait_for(play(), 60))
    assert first.next_state == "Q: " + call("add", first=2) + response("3")
    assert (last.reward, last.done) == (0.75, True)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tools": {"add": "tests.support.some_tools:ad"}}, "has no 'ad'; did you mean 'add'"),
        ({"judge": "tests.support.some_tools:juge"}, "has no 'juge'; did you mean 'judge'"),
        ({"tools": {}}, "need at least one of each, not 0 tools"),
        ({"max_calls": 0}, "max_calls=0"),
        ({"turn": "\n"}, "turn needs a place for {responses}"),
        ({"max_call": 1}, "an unexpected keyword argument 'max_call'; did you mean 'max_calls'"),
    ],
)
def test_wrong_options_are_named(options, what):
    with pytest.raises(EnvironmentFailed) as caught:
        load_environment(WHERE, OPTIONS | options)
    assert what in str(caught.value)
