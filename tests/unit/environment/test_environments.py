# SPDX-License-Identifier: Apache-2.0
"""Environments of tools, text worlds and games; thoughts that earn and call nothing."""

import asyncio
import json
import sys
import time
from itertools import compress

import pytest

from dlrover.python.rl.common.errors import EnvironmentFailed, MissingExtra
from dlrover.python.rl.environment.core.functions import load_environment
from dlrover.python.rl.environment.core.gym_adapter import GymEnvironment, gem, gymnasium
from dlrover.python.rl.environment.core.messages import make_assistant_message
from dlrover.python.rl.environment.core.turns import Guard, Trajectory
from dlrover.python.rl.environment.sandbox.environment_process import IsolatedEnvironment
from tests.support import some_tools

TOOL_ENVIRONMENT = "dlrover.python.rl.environment.core.tools:ToolEnvironment"
TOOLS = {name: f"tests.support.some_tools:{name}" for name in ("add", "search", "long", "gone")}
OPTIONS = {"tools": TOOLS, "judge": "tests.support.some_tools:judge"}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def played(*actions, extra_info=None, **options):
    """Return the texts that the policy saw after the actions, and the episode."""
    guard = Guard(load_environment(TOOL_ENVIRONMENT, OPTIONS | options), 30.0)
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


def response(text):
    return f"\n<tool_response>\n{text}\n</tool_response>\n"


@pytest.mark.feature(89)
async def test_tool_call_is_answered_and_the_answer_judged():
    seen, episode = await played(f"I add: {call('add', first=2, second=3)}", "it is 5")
    assert seen == [response("5")]
    assert (episode.done, episode.reward, episode.score, episode.turns, episode.failure) == (True, 0.75, 0.75, 2, None)
    assert (await played("5"))[1].reward == 1.0
    assert (await played("6"))[1].reward == 0.0
    seen, episode = await played(call("gone"), extra_info={"answer": "5"})
    assert (seen, episode.failure) == ([], "the server of the tool is gone")


async def test_tool_calls_may_be_several_async_and_unclosed():
    seen, episode = await played(
        call("search", query="Beijing") + call("add", first=1), call("add", first=3)[:-13], "5"
    )
    both = '{"found": "Beijing: ü"}\n</tool_response>\n<tool_response>\n2'
    assert seen == [response(both), response("4")]
    assert episode.extra_info["tool_calls"] == 3
    assert episode.reward == 0.25


async def test_tool_call_with_half_a_character_is_replaced():
    seen, episode = await played(call("search", query="Bei\ud83d"), call("\ud83d"), "5")
    assert seen[0] == response('{"found": "Bei\ufffd: ü"}')
    assert "error: there is no tool '\ufffd'" in seen[1]
    assert (episode.failure, episode.reward) == (None, 0.5)
    message = make_assistant_message(call("search", query="Bei\ud83d"))
    assert message["tool_calls"][0]["function"]["arguments"] == {"query": "Bei\ufffd"}


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (call("ad", first=1), "error: there is no tool 'ad'; did you mean 'add'?"),
        (call("add", frist=1), "error: 'add' does not take these arguments: missing a required argument: 'first'"),
        (call("add", first=1, secnd=1), "got an unexpected keyword argument 'secnd'; did you mean 'second'?"),
        (call("add", first="x"), 'error: TypeError: can only concatenate str (not "int") to str'),
        ("<tool_call>add(1)</tool_call>", "error: the call is not JSON: "),
        ("<tool_call>" + "[" * 100_000, "error: the call is not JSON: "),
        ("<tool_call>[1]</tool_call>", 'error: a call is {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object, not list"),
    ],
)
async def test_tool_call_with_a_fault_is_answered_with_an_error(action, message):
    some_tools.calls.clear()
    seen, episode = await played(action, "5")
    assert message in seen[0]
    assert (episode.failure, episode.reward) == (None, 0.75)
    assert some_tools.calls in ([], [("x", 1)])


async def test_tool_results_and_calls_are_limited():
    seen, _ = await played(call("long"), "5", longest_result=7)
    assert seen == [response("xxxxxxx\n(cut: 7 of 10000 characters)")]
    one = call("add", first=1)
    seen, episode = await played(one + one + one, f"{one} 5", max_calls=2)
    assert seen[0].count("2\n</tool_response>") == 2
    assert "error: no call is left: answer now" in seen[0]
    assert (episode.done, episode.reward) == (True, 0.5)


@pytest.mark.feature(87)
async def test_tool_responses_are_not_trained():
    turn = "<end>\n<user>{responses}<end>\n<assistant>"
    action = call("add", first=2)
    (seen,), _ = await played(action, "5", turn=turn)
    assert seen == "<end>\n<user><tool_response>\n3\n</tool_response><end>\n<assistant>"
    trajectory = Trajectory(lambda text: list(text.encode()), "Q: ")
    for state, text in (("Q: " + action + seen, action), (None, "5")):
        trajectory.act(text, list(text.encode()), {"logprobs": [0.0] * len(text), "versions": [0] * len(text)})
        if state is not None:
            assert trajectory.observe(state)
    (sequence,) = trajectory.sequences
    assert bytes(sequence.tokens).decode() == f"Q: {action}{seen}5"
    assert bytes(compress(sequence.tokens, sequence.values["action_mask"])).decode() == f"{action}5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": {"add": "tests.support.some_tools:ad"}}, "has no 'ad'; did you mean 'add'"),
        ({"tools": {}}, "need at least one of each, not 0 tools"),
        ({"max_calls": 0}, "max_calls=0"),
        ({"turn": "\n"}, "turn needs a place for {responses}"),
    ],
)
def test_tools_refuse_wrong_options(options, message):
    with pytest.raises(EnvironmentFailed) as caught:
        load_environment(TOOL_ENVIRONMENT, OPTIONS | options)
    assert message in str(caught.value)


WORLDS = "dlrover.python.rl.environment.core.gym_adapter"


class Countdown:
    """A world of three turns; counts itself."""

    count = 0

    def __init__(self):
        Countdown.count += 1
        self.left, self.seed = 0, None

    def reset(self, *, seed=None):
        self.left, self.seed = 3, seed
        return f"{self.left} left", {"suffix": "begin" if seed else ""}

    def step(self, action):
        if action == "hang":
            time.sleep(30)
        self.left -= 1
        return f"{self.left} left", 1, self.left == 0, action == "cut", {}


@pytest.fixture(autouse=True)
def _none_counted():
    Countdown.count = 0


async def play(guard, action, max_turns=9, **info):
    episode = await guard.reset("", info)
    while episode.state is not None and episode.turns < max_turns:
        await guard.step(episode, action(episode.state) if callable(action) else action)
    cut = episode.state
    await guard.close(episode)
    return episode, cut


@pytest.mark.feature(92)
async def test_worlds_of_a_pool_serve_more_samples():
    guard = Guard(GymEnvironment(Countdown, size=2))
    played = await asyncio.gather(*(play(guard, "x", max_turns=2 if at % 2 else 9) for at in range(8)))
    await guard.shutdown()
    for at, (episode, _) in enumerate(played):
        assert episode.failure is None
        assert (episode.turns, episode.done) == ((2, False) if at % 2 else (3, True))
    assert Countdown.count == 2


async def test_worlds_states_continue_each_other():
    worlds = GymEnvironment(Countdown, opening="<{observation}>", turn="[{observation}]")
    episode, cut = await play(Guard(worlds), "a", 2, seed=5)
    assert cut == "<3 left\nbegin>a[2 left]a[1 left]"
    assert (episode.reward, episode.score) == (2.0, 2.0)


@pytest.mark.feature(92)
async def test_hanging_world_is_not_used_again():
    guard = Guard(GymEnvironment(Countdown, size=1), timeout_s=0.5)
    stuck, _ = await play(guard, "hang")
    after = [await play(guard, "x") for _ in range(2)]
    assert stuck.failure == "step gave no answer within 0.5 s"
    assert all(episode.done for episode, _ in after)
    assert Countdown.count == 2


@pytest.mark.parametrize("isolated", [False, True])
async def test_world_failing_to_start_leaves_its_place(isolated):
    worlds = IsolatedEnvironment(f"{__file__}:Pool", {"size": 2}) if isolated else GymEnvironment(Broken, 2)
    guard = Guard(worlds, episodes=2)
    episodes = [(await play(guard, "x"))[0] for _ in range(5)]
    await guard.shutdown()
    assert all("it is broken" in episode.failure for episode in episodes)


class Broken:
    def reset(self, *, seed=None):
        raise OSError("it is broken")


class Pool(GymEnvironment):
    def __init__(self, size):
        super().__init__(Broken, size)


async def test_closed_episode_has_no_world_and_frees_no_others():
    with pytest.raises(ValueError, match="at least one environment, not 0"):
        GymEnvironment(Countdown, size=0)
    worlds, info = GymEnvironment(Countdown, size=1), {}
    await worlds.reset(info)
    with pytest.raises(EnvironmentFailed, match="all 1 environments are in use"):
        await worlds.reset({})
    await worlds.close(info)
    other = {}
    await worlds.reset(other)
    await worlds.close(info)
    with pytest.raises(EnvironmentFailed, match="has no environment"):
        await worlds.step("s", "a", info)
    assert (await worlds.step("s", "a", other)).reward == 1.0


def halving(state):
    """A player of GEM's guessing game."""
    low, high = 1, 10
    for line in state.splitlines():
        for word, above in (("higher than ", True), ("lower than ", False)):
            if word in line:
                value = int(line.rpartition(word)[2].strip(" ."))
                low, high = (max(low, value + 1), high) if above else (low, min(high, value - 1))
    return rf"\boxed{{{(low + high) // 2}}}"


@pytest.mark.feature(92)
@pytest.mark.slow
async def test_game_of_gem_is_played_to_its_end():
    pytest.importorskip("gem")
    guard = Guard(IsolatedEnvironment(f"{WORLDS}:gem", {"name": "game:GuessTheNumber-v0-easy", "size": 2}))
    assert guard._open_slots is not None
    won = await asyncio.gather(*(play(guard, halving, seed=seed) for seed in (0, 1, 7, 7)))
    cut, _ = await play(guard, halving, max_turns=1, seed=11)
    await guard.shutdown()
    assert [(episode.failure, episode.done, episode.reward) for episode, _ in won] == [(None, True, 1.0)] * 4
    assert cut.failure is None
    assert won[2][0].turns == won[3][0].turns


@pytest.mark.feature(92)
async def test_game_of_gymnasium_is_played_to_its_end():
    pytest.importorskip("gymnasium")
    options = {"name": "FrozenLake-v1", "size": 1, "make": {"is_slippery": False}, "unread": -1.0}
    guard = Guard(load_environment(f"{WORLDS}:gymnasium", options))
    moves = iter([1, 1, 2, 1, 2, 2])  # down, down, right, down, right, right
    won, _ = await play(guard, lambda state: f"I go \\boxed{{{next(moves)}}}", seed=1)
    unread = [(await play(guard, action))[0] for action in ("I go nowhere", "I go 7")]
    await guard.shutdown()
    assert (won.done, won.reward, won.turns) == (True, 1.0, 6)
    assert [(episode.done, episode.reward, episode.failure) for episode in unread] == [(True, -1.0, None)] * 2


def test_gymnasium_actions_of_other_spaces_need_a_reader():
    pytest.importorskip("gymnasium")
    with pytest.raises(ValueError, match="are of Box: give act"):
        gymnasium("Pendulum-v1")
    assert gymnasium("Pendulum-v1", act=float).episodes == 16


@pytest.mark.parametrize(("make", "extra"), [(gem, "gem"), (gymnasium, "gym")])
def test_worlds_of_absent_libraries_name_their_extra(monkeypatch, make, extra):
    monkeypatch.setitem(sys.modules, make.__name__, None)
    with pytest.raises(MissingExtra, match=rf"dlrover-rl\[{extra}\]"):
        make("any")
