"""Tools: functions that the policy calls in its actions, until it gives its answer.

::

    state --policy--> ... <tool_call>{"name": "search", "arguments": {"query": "Beijing"}}</tool_call>
    state + action + <tool_response>...</tool_response> --policy--> ... answer --judge--> reward

A call is data: it is parsed as JSON, and its name is looked up among the tools of the job. Nothing of it is evaluated.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.environment.base import StepResult
from dlrover.python.rl.environment.functions import called
from dlrover.python.rl.environment.lookup import load_function
from dlrover.python.rl.environment.rewards import WeightedRewards

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MADE = "tool_calls"
"""The key of ``extra_info`` under which the calls of an episode are counted."""


class ToolEnvironment:
    """Answers calls of tools; an action without one is the policy's answer, which ends the episode.

    Calls in one action are made one after the other. What goes wrong with a call is the policy's to see: no JSON, an
    unknown tool, arguments that it does not take, what it raises. Only a tool that raises
    :class:`~dlrover.python.rl.common.errors.EnvironmentFailed` (its server is gone, say) fails the sample.

    Args:
        tools: ``"package.module:function"`` by the names that the policy calls them by. They may be async; what they
            return is shown as it is if it is text, else as JSON.
        judge: ``"package.module:function"``, called as ``function(completion, answer, extra_info)`` with the text of
            the last action and ``extra_info["answer"]``; or several of these with their weights, whose weighted sum is
            the reward. ``extra_info["tool_calls"]`` is the number of calls that were made.
        max_calls: of an episode; an action that calls when none is left is judged as the answer.
        longest_result: characters of a result; the rest is cut off, and the policy is told so.
        turn: what stands behind an action with calls, ``{responses}`` in it being theirs. Give it a chat template's
            marks if the model expects them.

    Raises:
        VerifierError: there is no such function.
        ValueError: a limit is not positive, there is no tool, or ``turn`` has no place for responses.
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
            what = f"{len(tools)} tools, max_calls={max_calls} and longest_result={longest_result}"
            raise ValueError(f"need at least one of each, not {what}")
        if "{responses}" not in turn:
            raise ValueError(f"turn needs a place for {{responses}}: {turn!r}")
        self._tools = {name: load_function(where) for name, where in tools.items()}
        self._judge = WeightedRewards.load({judge: 1.0} if isinstance(judge, str) else judge)
        self._max_calls, self._longest_result, self._turn = max_calls, longest_result, turn

    async def reset(self, extra_info: dict[str, Any]) -> None:
        """An episode begins with the row's prompt, and no call made."""
        extra_info[_MADE] = 0

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        """Make the calls in ``action``, or judge it where there is none; the score is the reward.

        Raises:
            EnvironmentFailed: a tool raised it.
            VerifierError: the judge gave no reward.
        """
        calls, made = _CALL.findall(action), int(extra_info.get(_MADE, 0))
        if not calls or made >= self._max_calls:
            answer = extra_info.get("answer")
            reward = await self._judge.score(action, None if answer is None else str(answer), extra_info)
            return StepResult(None, reward.total, reward.total, True, extra_info)
        responses = [await self._response(call) for call in calls[: self._max_calls - made]]
        responses += ["error: no call is left: answer now"] * (len(calls) - len(responses))
        extra_info = {**extra_info, _MADE: min(made + len(calls), self._max_calls)}
        told = "\n".join(f"<tool_response>\n{response}\n</tool_response>" for response in responses)
        return StepResult(state + action + self._turn.replace("{responses}", told), 0.0, 0.0, False, extra_info)

    async def close(self, extra_info: dict[str, Any]) -> None:
        """An episode holds nothing."""

    async def shutdown(self) -> None:
        """Nothing is held."""

    async def _response(self, call: str) -> str:
        """What a call gave, or what is wrong with it."""
        try:
            function = self._bound(call)
        except _BadCall as error:
            return f"error: {error}"
        try:
            result = await called(function)
            shown = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except EnvironmentFailed:
            raise
        except Exception as error:  # noqa: BLE001 - a tool may raise what it likes: the policy chose its arguments
            shown = f"error: {type(error).__name__}: {error}"
        if len(shown) <= self._longest_result:
            return shown
        return f"{shown[: self._longest_result]}\n(cut: {self._longest_result} of {len(shown)} characters)"

    def _bound(self, call: str) -> Callable[[], Any]:
        """The tool with the arguments of a call.

        Raises:
            _BadCall: it is none.
        """
        try:
            asked = json.loads(call)
        except (ValueError, RecursionError) as error:
            raise _BadCall(f"the call is no JSON: {error}") from error
        if not isinstance(asked, dict) or not isinstance(asked.get("name"), str):
            raise _BadCall('a call is {"name": ..., "arguments": {...}}')
        name, arguments = asked["name"], asked.get("arguments", {})
        if name not in self._tools:
            raise _BadCall(f"there is no tool '{name[:100]}'{hint(name[:100], self._tools)}")
        if not isinstance(arguments, dict):
            raise _BadCall(f"the arguments of '{name}' must be an object, not {type(arguments).__name__}")
        _check_arguments(name, self._tools[name], arguments)
        return partial(self._tools[name], **arguments)


class _BadCall(Exception):
    """What the policy wrote is no call of a tool."""


def _check_arguments(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some written in C say nothing of themselves.
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = list(signature.parameters)
        unknown = [key for key in arguments if key not in known]
        close = hint(unknown[0][:100], known) if unknown else ""
        raise _BadCall(f"'{name}' does not take these arguments: {error}{close}") from error
