# SPDX-License-Identifier: Apache-2.0
"""Conversations between the policy and an environment, as OpenAI-style messages."""

import json
from typing import Any, TypeAlias

from dlrover.python.rl.data.jsonl import replace_surrogates
from dlrover.python.rl.data.model_text import split_calls, split_thoughts

Message: TypeAlias = dict[str, Any]
"""``role`` and ``content``; ``tool_calls`` of the assistant; ``tool_call_id`` and ``name`` of a tool."""

State: TypeAlias = str | list[Message]
"""The policy's input: text, or a conversation that the model's chat template renders."""


def make_assistant_message(text: str, turn: int = 0) -> Message:
    """The policy's action as a message.

    Calls in the format ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` become ``tool_calls``, with
    arguments as an object, and the text around them ``content``. If one of them cannot be parsed, all remain in
    ``content``, too. Thoughts are part of ``content``; calls in them are drafts, which remain there.
    """
    thoughts, answer = split_thoughts(text)
    around, calls = split_calls(answer or "")
    functions = [parse_call(call) for call in calls]
    parsed = [
        {"id": f"call{turn:03d}{index:02d}", "type": "function", "function": function}
        for index, function in enumerate(functions)
        if isinstance(function, dict)
    ]
    if len(parsed) == len(calls) > 0:
        return {"role": "assistant", "content": f"{thoughts}{around}".strip(), "tool_calls": parsed}
    return {"role": "assistant", "content": text, **({"tool_calls": parsed} if parsed else {})}


_CALL_KEYS = {"name", "arguments", "id", "type"}


def parse_call(text: str) -> dict[str, Any] | str:
    """The name and the arguments of a call; or why it is malformed."""
    try:
        call = replace_surrogates(json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"the call is no JSON: {error}"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call.keys() - _CALL_KEYS:
        return 'a call is {"name": ..., "arguments": {...}}'
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(arguments, dict):
        return f"the arguments of '{name[:100]}' must be an object, not {type(arguments).__name__}"
    return {"name": name, "arguments": arguments}
