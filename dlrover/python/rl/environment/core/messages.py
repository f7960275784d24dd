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
    """Make a message of the policy's action.

    Calls in the format ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` become ``tool_calls``, and the text
    around them ``content``. If a call cannot be parsed, all of them also remain in ``content``. Thoughts are part of
    ``content``, with the calls in them, which are drafts."""
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


def parse_call(text: str) -> dict[str, Any] | str:
    """Return the name and the arguments of a call, or its fault."""
    try:
        call = replace_surrogates(json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"the call is not JSON: {error}"
    keys = {"name", "arguments", "id", "type"}
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call.keys() - keys:
        return 'a call is {"name": ..., "arguments": {...}}'
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(arguments, dict):
        return f"the arguments of '{name[:100]}' must be an object, not {type(arguments).__name__}"
    return {"name": name, "arguments": arguments}
