# SPDX-License-Identifier: Apache-2.0
"""Environments that an OpenEnv server runs, by the client of the package ``openenv-core``."""

import json
from typing import Any

from openenv.core.generic_client import GenericEnvClient


class OpenEnv:
    """An agent that plays an episode of a running OpenEnv server.

    Args:
        url: the server's address.
        action: the field of the environment's action that gets the policy's text.
        observation: the field of an observation that is shown to the policy; empty: all of it as JSON.
        opening: the first message, with ``{observation}``.
        max_steps: the most actions of an episode."""

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str = "",
        opening: str = "{observation}",
        max_steps: int = 16,
    ) -> None:
        self._url, self._action, self._observation = url, action, observation
        self._opening, self._max_steps = opening, max_steps

    async def run(self, client: Any, row: dict[str, Any]) -> float:
        reward = 0.0
        async with GenericEnvClient(base_url=self._url) as environment:
            result = await environment.reset(**({"seed": row["seed"]} if "seed" in row else {}))
            shown = self._opening.replace("{observation}", self._show(result.observation))
            messages: list[dict[str, Any]] = [{"role": "user", "content": shown}]
            for _ in range(self._max_steps):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                message = answer.choices[0].message
                result = await environment.step({self._action: message.content or ""})
                reward += float(result.reward or 0.0)
                if result.done:
                    break
                messages += [message.model_dump(), {"role": "user", "content": self._show(result.observation)}]
        return reward

    def _show(self, observation: Any) -> str:
        value = observation.get(self._observation, "") if self._observation else observation
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
