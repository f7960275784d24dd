# SPDX-License-Identifier: Apache-2.0
"""Agents by name, and adapters of other packages as agents, each with the package itself."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.environment.core.agents import AgentEnvironment, find_agent, load_agent
from tests.support.agent_clients import acting
from tests.support.scripted import groups

SUPPORT = Path(__file__).parents[2] / "support"
SERVER = SUPPORT / "mcp_server.py"


class Message(SimpleNamespace):
    def model_dump(self):
        return {"role": "assistant", "content": self.content}


class Client:
    """A client of OpenAI's API that says what ``say`` returns for the messages."""

    def __init__(self, say):
        self.asks, self._say = [], say
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **ask):
        self.asks.append({**ask, "messages": list(ask["messages"])})
        message = self._say(ask["messages"])
        message = message if isinstance(message, Message) else Message(content=message, tool_calls=None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def call(number, name, arguments):
    return SimpleNamespace(id=number, function=SimpleNamespace(name=name, arguments=arguments))


@pytest.mark.needs("mcp")
async def test_tools_of_an_mcp_server_are_called_until_the_answer():
    calls = [call("1", "add", '{"first": 2, "second": 5}'), call("2", "ad", "{}"), call("3", "add", '{"first": "x"}')]
    client = Client(lambda messages: "7" if len(messages) > 1 else Message(content="", tool_calls=calls))
    server = {"command": sys.executable, "args": [str(SERVER)]}
    agent = load_agent("mcp", {"server": server, "judge": "exact"})
    assert await agent(client, {"prompt": "2+5?", "answer": "7"}) == 1.0
    (tool,) = client.asks[0]["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("add", "The sum.")
    assert set(tool["function"]["parameters"]["properties"]) == {"first", "second"}
    *_, first, second, third = client.asks[1]["messages"]
    assert first == {"role": "tool", "tool_call_id": "1", "content": "7"}
    assert second["content"].startswith("error") and third["content"].startswith("error")


@pytest.mark.needs("mcp")
async def test_calls_beyond_the_most_are_scored_as_the_answer():
    again = Message(content="7", tool_calls=[call("1", "add", '{"first": 2}')])
    agent = load_agent("mcp", {"server": {"command": sys.executable, "args": [str(SERVER)]}, "judge": "exact",
                               "max_calls": 2})  # fmt: skip
    client = Client(lambda messages: again)
    assert await agent(client, {"prompt": [{"role": "user", "content": "2+1?"}], "answer": "7"}) == 1.0
    assert len(client.asks) == 3


@pytest.mark.needs("reasoning_gym")
async def test_reasoning_gym_scores_the_answer_by_its_own_rule():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("leg_counting", size=20, seed=7)[3]
    agent = load_agent("reasoning_gym", {"task": "leg_counting", "size": 20, "seed": 7})
    client = Client(lambda messages: f"I count. <answer>{entry['answer']}</answer>")
    assert await agent(client, {"seed": 23}) == 1.0
    assert client.asks[0]["messages"][0]["content"].startswith(entry["question"])
    assert await agent(Client(lambda messages: "<answer>-1</answer>"), {"seed": 3}) < 0.5
    whole = load_agent("reasoning_gym", {"task": "leg_counting", "size": 20, "seed": 7, "tag": ""})
    assert await whole(Client(lambda messages: f" {entry['answer']}\n"), {"seed": 3}) == 1.0


class Episode:
    """A client of an OpenEnv server in this process: the reward is 1 for each ``yes``, and three steps end it."""

    def __init__(self, base_url):
        self.base_url, self.steps = base_url, 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self.base_url = None

    async def reset(self, **options):
        return SimpleNamespace(observation={"text": f"begin {options['seed']}"}, reward=None, done=False)

    async def step(self, action):
        self.steps += 1
        observation = {"text": f"step {self.steps}"}
        return SimpleNamespace(observation=observation, reward=float(action["message"] == "yes"), done=self.steps == 3)


@pytest.mark.needs("openenv")
async def test_openenv_episode_sums_its_rewards(monkeypatch):
    from dlrover.python.rl.environment.agents import openenv

    monkeypatch.setattr(openenv, "GenericEnvClient", Episode)
    agent = load_agent("openenv", {"url": "http://127.0.0.1:1", "observation": "text"})
    client = Client(lambda messages: "no" if len(messages) == 3 else "yes")
    assert await agent(client, {"seed": 5}) == 2.0
    contents = [message["content"] for message in client.asks[-1]["messages"]]
    assert contents == ["begin 5", "yes", "step 1", "no", "step 2"]
    assert await load_agent("openenv", {"url": "x", "max_steps": 1})(Client(lambda messages: "yes"), {"seed": 5}) == 1.0


@pytest.mark.needs("verifiers")
def test_taskset_of_verifiers_is_played_and_scored(monkeypatch):
    monkeypatch.syspath_prepend(str(SUPPORT / "tasksets"))
    agent = load_agent("verifiers", {"taskset": "letters_taskset", "options": {"words": ["one", "two", "fail"]}})
    before = {*os.environ}

    async def run(client, row):
        return await agent(SimpleNamespace(base_url=client.url, api_key=client.key), row)

    with acting(lambda context, _: "abcd" if "Again" in context else "ab1", run) as rolled:
        rows = rolled.fetch(groups(*({"seed": seed} for seed in range(5))))
        rolled.loop.run(agent.__self__.close())
    assert [score for score in rows.dense("score").tolist() if score == score] == [0.375] * 4
    faults = rows.objects("error")
    assert "of a reward" in faults[2] and [*map(bool, faults)] == [False, False, True, False, False]
    assert rows.dense("turns").tolist() == [2] * 5 and {*os.environ} == before


@pytest.mark.needs("verifiers")
def test_unknown_taskset_of_verifiers_is_named():
    with pytest.raises(ModuleNotFoundError, match="no_taskset"):
        load_agent("verifiers", {"taskset": "no_taskset"})


@pytest.mark.parametrize(
    ("where", "options", "fault"),
    [
        ("reasoning", {}, "reasoning_gym"),
        ("tests.support.plain_agents:rum", {}, "run"),
        ("tests.support.plain_agents:plain", {}, "async def run"),
        ("tests.support.plain_agents:run", {"deph": 2}, "depth"),
        ("tests.support.plain_agents:Made", {"deph": 2}, "depth"),
        ("tests.support.plain_agents:lonely", {}, "too many"),
    ],
)
def test_unusable_agent_is_named_before_the_start(where, options, fault):
    with pytest.raises(EnvironmentFailed, match=fault):
        find_agent(where, options)


async def test_options_of_functions_and_classes_reach_the_agent():
    for name in ("run", "Made"):
        agent = load_agent(f"tests.support.plain_agents:{name}", {"depth": 3})
        assert await agent(None, {"value": 2}) == 6


class Closing:
    """An agent with resources."""

    def __init__(self, fails=False):
        self.fails, self.times = fails, 0

    async def run(self, client, row):
        return 1.0

    async def close(self):
        self.times += 1
        if self.fails:
            raise OSError("it was gone")


@pytest.mark.needs("openai")
@pytest.mark.parametrize("fails", [False, True])
async def test_agent_is_closed_once_and_connections_in_any_case(fails):
    environment = AgentEnvironment(f"{__name__}:Closing", {"fails": fails})
    result = await environment.step("http://127.0.0.1:1", "key", {"prompt": "x"})
    with pytest.raises(OSError, match="was gone") if fails else nullcontext():
        await environment.shutdown()
    assert result.reward == 1.0
    assert environment._run.__self__.times == 1 and environment._connections.is_closed
