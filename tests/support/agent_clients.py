# SPDX-License-Identifier: Apache-2.0
"""Agents in this process that act on a scripted engine through the real endpoint, with plain HTTP."""

from contextlib import contextmanager

import httpx

from dlrover.python.rl.environment.core.functions import UserEnvironment
from dlrover.python.rl.recipe.base.config import AgentConfig
from dlrover.python.rl.recipe.rollout.agents import AgentGuard
from dlrover.python.rl.recipe.rollout.endpoint import AgentEndpoint
from tests.support import chat_environments
from tests.support.scripted import Rolling


class Client:
    """Posts to an episode; ``url`` and ``key`` are the episode's."""

    def __init__(self, url, key, http):
        self.url, self.key, self._http = url, key, http

    async def post(self, path, body, key=None, url=None):
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {b"authorization": b"Bearer " + (self.key if key is None else key).encode()}
        return await self._http.post(f"{url or self.url}/{path}", headers=headers, **content)

    async def chat(self, *messages, **options):
        """Return the first choice's message, and the whole answer."""
        messages = [message if isinstance(message, dict) else user(message) for message in messages]
        answer = await self.post("chat/completions", {"model": "policy", "messages": messages, **options})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"], answer.json()

    async def text(self, prompt, **options):
        answer = await self.post("completions", {"model": "policy", "prompt": prompt, **options})
        assert answer.status_code == 200, answer.text
        return answer.json()


def user(text):
    return {"role": "user", "content": text}


class _Direct:
    """Runs ``run(client, row)`` in the rollouts' event loop."""

    def __init__(self, run):
        self._run, self.faults = run, []

    async def step(self, state, action, extra_info):
        async with httpx.AsyncClient(timeout=600.0, verify=False) as http:
            try:
                result = await self._run(Client(state, action, http), extra_info)
            except AssertionError as error:
                self.faults.append(error)
                raise
        return {"done": True, **(result if isinstance(result, dict) else {"reward": result})}


@contextmanager
def acting(say, run, max_turns=8, patience_s=10.0, environment=None, copies=None, **settings):
    """A scheduler whose samples are runs of an agent; the model has a chat template with tools."""
    endpoint = AgentEndpoint(patience_s=patience_s)
    direct = _Direct(run)
    guard = AgentGuard(environment or UserEnvironment(direct, "agent"), endpoint, AgentConfig(**settings))
    rolled = Rolling(say, None, max_turns, guard=guard, copies=copies)
    rolled.engine.tokenizer.chat_template = chat_environments.TEMPLATE
    rolled.endpoint, rolled.max_new_tokens = endpoint, 100
    try:
        yield rolled
    finally:
        rolled.loop.run(rolled.scheduler.close())
        rolled.loop.close()
        endpoint.close()
    for fault in direct.faults:
        raise fault
