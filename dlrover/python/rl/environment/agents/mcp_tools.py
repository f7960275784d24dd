# SPDX-License-Identifier: Apache-2.0
"""The tools of a server of the Model Context Protocol, by the package ``mcp``."""

import json
from collections.abc import Mapping
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from dlrover.python.rl.environment.core.scoring import Completed, WeightedRewards


class McpAgent:
    """An agent that lets the policy call a server's tools until it answers, and scores the answer.

    Args:
        server: the server's URL, or ``{command: ..., args: [...]}`` of a server to start for each episode.
        judge: the verifier, a reward function or several with weights, as of ``tools``.
        max_calls: maximum calls of an episode; a further call is scored as the answer.
        longest_result: maximum characters of a result, which is cut."""

    def __init__(
        self,
        server: str | Mapping[str, Any],
        judge: str | Mapping[str, float],
        max_calls: int = 8,
        longest_result: int = 4_000,
    ) -> None:
        self._server = server if isinstance(server, str) else StdioServerParameters(**server)
        self._judge = WeightedRewards.load({judge: 1.0} if isinstance(judge, str) else judge)
        self._max_calls, self._longest_result = max_calls, longest_result

    async def run(self, client: Any, row: dict[str, Any]) -> float:
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        transport = self._server if isinstance(self._server, str) else stdio_client(self._server)
        async with Client(transport) as server:
            tools = [_describe(tool) for tool in (await server.list_tools()).tools]
            count = 0
            while True:
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
                message = answer.choices[0].message
                calls = message.tool_calls or []
                if not calls or count + len(calls) > self._max_calls:
                    break
                count += len(calls)
                messages.append(message.model_dump())
                for call in calls:
                    content = await self._call(server, call.function)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        answered = None if row.get("answer") is None else str(row["answer"])
        info = {**row, "tool_calls": count}
        return (await self._judge.score(Completed(message.content or "", answered, info))).total

    async def _call(self, server: Client, function: Any) -> str:
        """Return the text of a call's result, or the error, which the policy sees."""
        try:
            result = await server.call_tool(function.name, json.loads(function.arguments))
        except Exception as error:  # noqa: BLE001 - a server may fail in any way: the policy chose the arguments
            return f"error: {type(error).__name__}: {error}"[: self._longest_result]
        text = "\n".join(getattr(part, "text", "") for part in result.content)
        return f"{'error: ' if result.is_error else ''}{text}"[: self._longest_result]


def _describe(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}
