# SPDX-License-Identifier: Apache-2.0
"""Tools: functions that the policy calls in its actions until it answers.

::

    state --policy--> ... <tool_call>{"name": "search", "arguments": {"query": "Beijing"}}</tool_call>
    state + action + <tool_response>...</tool_response> --policy--> ... answer --verifier--> reward

Prompts of messages make conversations: the chat template lists the tools, and results are messages of role ``tool``.

A call is data: it is parsed as JSON, and its name is looked up among the tools of the job. Nothing is evaluated. A call
in the policy's thoughts is a draft, which is not made."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_origin

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.conversation import find_think_prefix
from dlrover.python.rl.data.model_text import split_calls, split_thoughts
from dlrover.python.rl.environment.core.base import StepResult
from dlrover.python.rl.environment.core.functions import call_async, find_argument_fault, load_function
from dlrover.python.rl.environment.core.messages import Message, State, parse_call
from dlrover.python.rl.environment.core.scoring import Completed, WeightedRewards

_TURN = "\n{responses}\n"
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_NAMED_TYPES = {kind.__name__: name for kind, name in _TYPES.items()}  # of ``from __future__ import annotations``
_VAR_ARGS, _VAR_KWARGS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_CALLS_MADE = "tool_calls"  # the key of ``extra_info`` under which the calls of an episode are counted


class ToolEnvironment:
    """Answers tool calls; an action without a call is the policy's answer, which ends the episode.

    Calls of an action run in order. The policy sees their errors: invalid JSON, an unknown tool, wrong arguments, and
    exceptions. Only :class:`~dlrover.python.rl.common.errors.EnvironmentFailed` fails the sample.

    Args:
        tools: ``"package.module:function"`` by tool name; sync or async. Results are text, or shown as JSON.
        judge: the verifier, a reward function or several with weights, called with the last action and
            ``extra_info["answer"]``; ``extra_info["tool_calls"]`` counts calls.
        max_calls: maximum calls of an episode; a further call is scored as the answer.
        longest_result: maximum characters of a result, which is cut with a note.
        turn: the text after an action with calls, with ``{responses}``, perhaps with a chat template's marks; every
            state is text. None: prompts of messages make conversations, and texts have line breaks around responses.
        thoughts: as ``reward.thoughts``, for the judge."""

    def __init__(
        self,
        tools: Mapping[str, str],
        judge: str | Mapping[str, float],
        max_calls: int = 8,
        longest_result: int = 4_000,
        turn: str | None = None,
        thoughts: Literal["ignored", "scored"] = "ignored",
    ) -> None:
        if not tools or max_calls < 1 or longest_result < 1:
            counts = f"{len(tools)} tools, max_calls={max_calls} and longest_result={longest_result}"
            raise ValueError(f"need at least one of each, not {counts}")
        if turn is not None and "{responses}" not in turn:
            raise ValueError(f"turn needs a place for {{responses}}: {turn!r}")
        self.uses_messages = turn is None
        self._tools = {name: load_function(where) for name, where in tools.items()}
        self._judge = WeightedRewards.load({judge: 1.0} if isinstance(judge, str) else judge)
        self._max_calls, self._longest_result, self._turn = max_calls, longest_result, turn or _TURN
        self._ignores_thoughts = thoughts == "ignored"
        self.chat_template_kwargs = {"tools": [describe_tool(*item) for item in self._tools.items()]}

    async def reset(self, extra_info: dict[str, Any]) -> None:
        extra_info[_CALLS_MADE] = 0

    async def step(self, state: State, action: str | Message, extra_info: dict[str, Any]) -> StepResult:
        """Make the calls in ``action``, or judge an action without calls; the score is the reward. Raises VerifierError
        if the judge gives no reward, and EnvironmentFailed if a tool raises it."""
        text = action if isinstance(action, str) else action["content"]
        think_prefix = find_think_prefix(state) if isinstance(state, str) else ""  # a message's content includes it
        _, calls = split_calls(split_thoughts(text, think_prefix)[1] or "")
        requested = [] if isinstance(action, str) else action.get("tool_calls", [])
        # The content of a message has all calls if one is malformed.
        calls = calls if len(calls) > len(requested) else [json.dumps(call["function"]) for call in requested]
        count = int(extra_info.get(_CALLS_MADE, 0))
        if not calls or count >= self._max_calls:
            answer = None if extra_info.get("answer") is None else str(extra_info["answer"])
            prefix = think_prefix if self._ignores_thoughts else None
            reward = await self._judge.score(Completed(text, answer, extra_info, think_prefix=prefix))
            return StepResult(None, reward.total, reward.total, True, extra_info)
        responses = [await self._response(call) for call in calls[: self._max_calls - count]]
        responses += ["error: no call is left: answer now"] * (len(calls) - len(responses))
        extra_info = {**extra_info, _CALLS_MADE: min(count + len(calls), self._max_calls)}
        if isinstance(state, str):
            shown = "\n".join(f"<tool_response>\n{response}\n</tool_response>" for response in responses)
            return StepResult(f"{state}{text}{self._turn.replace('{responses}', shown)}", 0.0, 0.0, False, extra_info)
        messages = [{"role": "tool", "content": response} for response in responses]
        parsed = [message for message, call in zip(messages, calls, strict=True) if isinstance(parse_call(call), dict)]
        for message, call in zip(parsed, requested, strict=False):
            message |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
        return StepResult(messages, 0.0, 0.0, False, extra_info)

    async def _response(self, call: str) -> str:
        """Return the result of a call, or the error."""
        parsed, fault = parse_call(call), ""
        name, arguments = ("", {}) if isinstance(parsed, str) else (parsed["name"], parsed["arguments"])
        if isinstance(parsed, str):
            fault = parsed
        elif name not in self._tools:
            fault = f"there is no tool '{name[:100]}'{hint(name[:100], self._tools)}"
        elif mismatch := find_argument_fault(self._tools[name], arguments):
            fault = f"'{name}' does not take these arguments: {mismatch}"
        if fault:
            return f"error: {fault}"
        try:
            result = await call_async(partial(self._tools[name], **arguments))
            shown = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except EnvironmentFailed:
            raise
        except Exception as error:  # noqa: BLE001 - a tool may raise anything: the policy chose its arguments
            shown = f"error: {type(error).__name__}: {error}"
        if len(shown) <= self._longest_result:
            return shown
        return f"{shown[: self._longest_result]}\n(cut: {self._longest_result} of {len(shown)} characters)"


def describe_tool(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function in OpenAI's format: its docstring, and its parameters with their types."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have no signature
        signature = inspect.Signature()
    parameters = [item for item in signature.parameters.values() if item.kind not in (_VAR_ARGS, _VAR_KWARGS)]
    properties: dict[str, Any] = {}
    for item in parameters:
        kind = _TYPES.get(get_origin(item.annotation) or item.annotation) or _NAMED_TYPES.get(item.annotation)
        properties[item.name] = {"type": kind} if kind else {}
    required = [item.name for item in parameters if item.default is inspect.Parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    description = inspect.getdoc(function) or ""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
