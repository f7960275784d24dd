# SPDX-License-Identifier: Apache-2.0
"""Agents: ``async def run(client, row)``, a program of the user that acts by requests to the policy."""

import importlib.util
import inspect
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeAlias

from dlrover.python.rl.common.by_value import readable_name
from dlrover.python.rl.common.errors import EnvironmentFailed, MissingExtra
from dlrover.python.rl.common.extensions import ExtensionPoint
from dlrover.python.rl.environment.core.base import StepResult, validate_step
from dlrover.python.rl.environment.core.functions import find_argument_fault, load_named

_ADAPTERS = "dlrover.python.rl.environment.agents"

AGENTS = ExtensionPoint(
    "agent",
    "dlrover_rl.agents",
    {
        "mcp": f"{_ADAPTERS}.mcp_tools:McpAgent",
        "openenv": f"{_ADAPTERS}.openenv:OpenEnv",
        "reasoning_gym": f"{_ADAPTERS}.reasoning:ReasoningGym",
        "verifiers": f"{_ADAPTERS}.verifiers:Verifiers",
    },
    {},
)

Agent: TypeAlias = Callable[[Any, dict[str, Any]], Coroutine[Any, Any, Any]]


def find_agent(where: str, options: Mapping[str, Any]) -> Any:
    """Return the function or class of an agent: a name of ``AGENTS``, or ``package.module:name`` or
    ``path/to/script.py:name``. Raises EnvironmentFailed if there is none, or if it does not take its options."""
    target, name = load_named(AGENTS, where, default="run"), readable_name(where)
    run = target.run if isinstance(target, type) and hasattr(target, "run") else target
    if not inspect.iscoroutinefunction(run):
        raise EnvironmentFailed(f"{name} is not 'async def run(client, row)', nor a class with such a method")
    if run is target:
        fault = find_argument_fault(run, options, "client", "row")
    else:
        fault = find_argument_fault(target, options) or find_argument_fault(run, {}, "self", "client", "row")
    if fault:
        raise EnvironmentFailed(f"{name} does not take its arguments: {fault}")
    return target


def load_agent(where: str, options: Mapping[str, Any]) -> Agent:
    """Return the agent with its options: a function gets them in each call, a class when it is created."""
    target = find_agent(where, options)
    agent: Agent = target(**options).run if isinstance(target, type) else partial(target, **options)
    return agent


def require_openai() -> None:
    """Raise MissingExtra if the package of the client is not installed."""
    if importlib.util.find_spec("openai") is None:
        raise MissingExtra("openai", "agents")


class AgentEnvironment:
    """An environment of one step, which runs an agent to its end in this process.

    The state is the URL of the episode's endpoint, the action its key, and ``extra_info`` the row with its ``prompt``.
    All clients share their connections, which are as many as the open requests and pass no proxy."""

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        require_openai()
        self._run = load_agent(agent, options)
        self._connections: Any = None

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        import httpx  # with openai the extra ``agents``, in the agents' process only
        import openai

        if self._connections is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            self._connections = openai.DefaultAsyncHttpxClient(trust_env=False, limits=limits)
        client = openai.AsyncOpenAI(base_url=state, api_key=action, http_client=self._connections)
        result = await self._run(client, extra_info)
        fields = dict(result) if isinstance(result, Mapping) else {"reward": result}
        return validate_step({**fields, "done": True}, {}, needs_state=False)

    async def shutdown(self) -> None:
        close = getattr(getattr(self._run, "__self__", None), "close", None)
        try:
            if inspect.iscoroutinefunction(close):
                await close()
        finally:
            if self._connections is not None:
                await self._connections.aclose()
