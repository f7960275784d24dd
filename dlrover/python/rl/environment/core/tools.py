# SPDX-License-Identifier: Apache-2.0
"""Tools: functions that the policy calls in its actions, until it gives its answer.

::

    state --policy--> ... <tool_call>{"name": "search", "arguments": {"query": "Beijing"}}</tool_call>
    state + action + <tool_response>...</tool_response> --policy--> ... answer --verifier--> reward

A call is data: it is parsed as JSON, and its name is looked up among the tools of the job. Nothing of it is evaluated.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.environment.core.base import StepResult
from dlrover.python.rl.environment.core.functions import call_async, find_argument_fault, load_function
from dlrover.python.rl.environment.core.scoring import Completed, WeightedRewards

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_CALLS_MADE = "tool_calls"
"""The key of ``extra_info`` under which the calls of an episode are counted."""


class ToolEnvironment:
    """Answers tool calls; an action without one is the policy's answer, which ends the episode.

    Calls of an action run in order. The policy sees their errors: invalid JSON, an unknown tool, wrong arguments, what
    a tool raises. Only :class:`~dlrover.python.rl.common.errors.EnvironmentFailed` fails the sample.

    Args:
        tools: ``"package.module:function"`` by tool name; sync or async. Results are text, or shown as JSON.
        judge: the verifier, a reward function or several with weights, called with the last action and
            ``extra_info["answer"]``; ``extra_info["tool_calls"]`` counts calls.
        max_calls: of an episode; a further call is scored as the answer.
        longest_result: characters of a result; the rest is cut, with a note.
        turn: the template after an action with calls, with ``{responses}``; may hold a chat template's marks.
    """

    def __init__(
        self,
        tools: Mapping[str, str],
        judge: str | Mapping[str, float],
        max_calls: int = 8,
        longest_result: int = 4_000,
        turn: str = "\n{responses}\n",
    ) -> None:
        if not tools or max_calls < 1 or longest_result < 1:
            counts = f"{len(tools)} tools, max_calls={max_calls} and longest_result={longest_result}"
            raise ValueError(f"need at least one of each, not {counts}")
        if "{responses}" not in turn:
            raise ValueError(f"turn needs a place for {{responses}}: {turn!r}")
        self._tools = {name: load_function(where) for name, where in tools.items()}
        self._judge = WeightedRewards.load({judge: 1.0} if isinstance(judge, str) else judge)
        self._max_calls, self._longest_result, self._turn = max_calls, longest_result, turn

    async def reset(self, extra_info: dict[str, Any]) -> None:
        extra_info[_CALLS_MADE] = 0

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        """Make the calls in ``action``, or judge it where there is none; the score is the reward.

        Raises:
            EnvironmentFailed: a tool raised it.
            VerifierError: the judge gave no reward.
        """
        calls, made = _CALL.findall(action), int(extra_info.get(_CALLS_MADE, 0))
        if not calls or made >= self._max_calls:
            answer = extra_info.get("answer")
            answered = Completed(action, None if answer is None else str(answer), extra_info)
            reward = await self._judge.score(answered)
            return StepResult(None, reward.total, reward.total, True, extra_info)
        responses = [await self._response(call) for call in calls[: self._max_calls - made]]
        responses += ["error: no call is left: answer now"] * (len(calls) - len(responses))
        extra_info = {**extra_info, _CALLS_MADE: min(made + len(calls), self._max_calls)}
        shown = "\n".join(f"<tool_response>\n{response}\n</tool_response>" for response in responses)
        return StepResult(state + action + self._turn.replace("{responses}", shown), 0.0, 0.0, False, extra_info)

    async def close(self, extra_info: dict[str, Any]) -> None:
        """An episode holds nothing."""

    async def shutdown(self) -> None:
        """Nothing is held."""

    async def _response(self, call: str) -> str:
        """Return the result of a call, or the error."""
        try:
            function = self._bound(call)
        except _BadCall as error:
            return f"error: {error}"
        try:
            result = await call_async(function)
            shown = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except EnvironmentFailed:
            raise
        except Exception as error:  # noqa: BLE001 - a tool may raise what it likes: the policy chose its arguments
            shown = f"error: {type(error).__name__}: {error}"
        if len(shown) <= self._longest_result:
            return shown
        return f"{shown[: self._longest_result]}\n(cut: {self._longest_result} of {len(shown)} characters)"

    def _bound(self, call: str) -> Callable[[], Any]:
        """The tool with the arguments of a call, or _BadCall."""
        try:
            request = json.loads(call)
        except (ValueError, RecursionError) as error:
            raise _BadCall(f"the call is no JSON: {error}") from error
        if not isinstance(request, dict) or not isinstance(request.get("name"), str):
            raise _BadCall('a call is {"name": ..., "arguments": {...}}')
        name, arguments = request["name"], request.get("arguments", {})
        if name not in self._tools:
            raise _BadCall(f"there is no tool '{name[:100]}'{hint(name[:100], self._tools)}")
        if not isinstance(arguments, dict):
            raise _BadCall(f"the arguments of '{name}' must be an object, not {type(arguments).__name__}")
        if fault := find_argument_fault(self._tools[name], arguments):
            raise _BadCall(f"'{name}' does not take these arguments: {fault}")
        return partial(self._tools[name], **arguments)


class _BadCall(Exception):
    """What the policy wrote is no call of a tool."""
