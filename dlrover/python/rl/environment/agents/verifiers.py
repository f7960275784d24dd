# SPDX-License-Identifier: Apache-2.0
"""Tasksets and environments of the package ``verifiers``, whose harnesses act and whose tasks score."""

import asyncio
import copy
import os
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any

import verifiers.v1 as vf

from dlrover.python.rl.common.errors import EnvironmentFailed


class Verifiers:
    """An agent that plays task number ``row["seed"]`` of a taskset.

    Args:
        taskset: its id, the name of an installed package.
        options: of the taskset.
        environment: other keys of the environment's configuration. The agent of a taskset without an environment has
            by default the taskset's harness, or ``null``, which is a chat with the task's tools, on this machine.
        size: maximum tasks to load, which repeat after the last one."""

    def __init__(
        self,
        taskset: str,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        size: int = 10_000,
    ) -> None:
        values = {"taskset": {"id": taskset, **(options or {})}, **(environment or {})}
        if vf.environment_class(taskset, values.get("id", "")) is vf.SingleAgentEnv:
            harness = vf.default_harness_id(taskset)
            harness = "null" if harness == "bash" else harness  # bash runs the policy's commands on this machine
            defaults = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
            values["agent"] = {**defaults, **values.get("agent", {})}
        self._environment = vf.load_environment(vf.resolve_env_config(values))
        self._tasks = [*islice(self._environment.taskset, size)]
        if not self._tasks:
            raise ValueError(f"the taskset '{taskset}' has no tasks")
        self._lock, self._shared = asyncio.Lock(), AsyncExitStack()
        self._is_serving = False

    async def run(self, client: Any, row: dict[str, Any]) -> float:
        async with self._lock:
            if not self._is_serving:
                await self._shared.enter_async_context(self._environment.serving())  # tools that all episodes share
                self._is_serving = True
        environment = copy.copy(self._environment)
        environment._interception = None  # each episode has its own, which closes the episode's connections
        variable = f"DLROVER_RL_API_KEY_{secrets.token_hex(8)}"  # with API_KEY, programs of a harness do not inherit it
        os.environ[variable] = client.api_key
        try:
            endpoint = vf.EvalClientConfig(base_url=str(client.base_url), api_key_var=variable)
            task = self._tasks[int(row.get("seed", 0)) % len(self._tasks)]
            episode = await environment.run_episode(task, vf.ModelContext(model="policy", client=endpoint))
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EnvironmentFailed(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode has failed")
        rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
        return float(sum(rewards) / max(len(rewards), 1))

    async def close(self) -> None:
        await self._shared.aclose()
