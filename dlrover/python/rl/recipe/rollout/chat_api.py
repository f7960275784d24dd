# SPDX-License-Identifier: Apache-2.0
"""The shapes of OpenAI's API: requests of agents as an :class:`Ask`, and actions of the policy as answers to them.

Sampling belongs to the job: ``temperature``, ``top_p`` and ``seed`` are accepted and have no effect, and a parameter
that would change the policy's distribution is refused, since the policy is trained on what was sampled."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from math import inf
from typing import Any, Literal, TypeAlias

from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.jsonl import find_message_faults, normalize_message, replace_surrogates
from dlrover.python.rl.environment.core.messages import Message, State

MODEL = "policy"
"""The name of the only model."""

_MOST_CHOICES, _MOST_STOPS = 16, 4
_IGNORED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "user", "store", "metadata", "service_tier",
    "parallel_tool_calls", "safety_identifier", "prompt_cache_key", "reasoning_effort", "verbosity",
    "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"), "top_logprobs": (0,), "best_of": (1,),
    "echo": (False,), "suffix": ("",), "modalities": (["text"],), "functions": ([],), "function_call": ("auto", "none"),
    "ignore_eos": (False,), "min_tokens": (0,), "audio": (), "prediction": (), "moderation": (),
    "web_search_options": (),
}  # fmt: skip
"""The values without an effect of parameters that are refused otherwise."""
_COMMON = ("model", "n", "max_tokens", "stop", "stream", "stream_options", "logprobs", "return_token_ids")
_OWN = {
    "chat": ("messages", "tools", "max_completion_tokens", "chat_template_kwargs"),
    "text": ("prompt",),
}
_RESERVED = (
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""The parameters of ``apply_chat_template``, which are not the template's own variables."""
_EMPTY_KEYS = ("annotations", "refusal", "audio", "function_call", "reasoning", "reasoning_content")

Kind: TypeAlias = Literal["chat", "text"]


class ApiError(Exception):
    """An error in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        limit = "requests" if retry else "insufficient_quota"
        names = {429: limit, 500: "server_error", 503: "server_error"}
        self.status, self.retry = status, retry
        self.body = {"message": message, "type": names.get(status, "invalid_request_error")}
        self.body |= {"param": param, "code": code}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Ask:
    """A checked request: the ``state`` that the policy continues, and the form of the answer."""

    kind: Kind
    state: State
    template_kwargs: Mapping[str, Any]  #: arguments of the chat template, with the tools
    max_tokens: int | None
    stop: tuple[str, ...]
    n: int
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False

    @cached_property
    def digest(self) -> bytes:
        """Identifies the request by what the actions depend on."""
        parts = [self.kind, self.state, dict(self.template_kwargs), self.max_tokens, self.stop, self.n]
        return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Choice:
    """An action of the policy."""

    text: str  #: without the stop string
    tokens: Sequence[int]
    token_texts: Sequence[str]
    logprobs: Sequence[float]
    finish: Literal["stop", "length"]
    message: Message


@dataclass(frozen=True)
class Answer:
    ask: Ask
    choices: Sequence[Choice]
    prompt_tokens: Sequence[int]
    version: int  #: of the weights
    created_s: int
    limits: dict[str, int] = field(default_factory=dict)


def parse_ask(kind: Kind, body: bytes) -> Ask:
    """Check a request's body. Raises ApiError, which names the parameter."""
    try:
        values = replace_surrogates(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}"[:500]) from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object")
    values = {name: value for name, value in values.items() if value is not None}
    _check_names(kind, values)
    if _take(values, "model", str, "") != MODEL:
        message = f"the model '{str(values.get('model', ''))[:100]}' does not exist: the only one is '{MODEL}'"
        raise ApiError(404, message, "model_not_found", "model")
    most = _take(values, "max_completion_tokens", int, _take(values, "max_tokens", int, None, 1), 1)
    stop = values.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stops, list) and all(isinstance(each, str) and each for each in stops)):
        raise ApiError(400, "'stop' must be text or a list of texts", None, "stop")
    if len(stops) > _MOST_STOPS:
        raise ApiError(400, f"'stop' has {len(stops)} texts, {_MOST_STOPS} at most", None, "stop")
    state, template_kwargs = (_chat_state if kind == "chat" else _text_state)(values)
    logprobs = values.get("logprobs", False)
    if kind == "text" and logprobs not in (0, False):
        raise ApiError(400, "'logprobs' must be 0: only sampled tokens have log-probs", None, "logprobs")
    options = _take(values, "stream_options", dict, {})
    if values.get("stream") and values.get("return_token_ids"):
        message = "'return_token_ids' is not supported with 'stream': leave out one of them"
        raise ApiError(400, message, "unsupported_parameter", "return_token_ids")
    return Ask(
        kind, state, template_kwargs, most, tuple(stops), _take(values, "n", int, 1, 1, _MOST_CHOICES),
        _take(values, "stream", bool, False), bool(options.get("include_usage")),
        "logprobs" in values if kind == "text" else _take(values, "logprobs", bool, False),
        _take(values, "return_token_ids", bool, False),
    )  # fmt: skip


def _check_names(kind: Kind, values: Mapping[str, Any]) -> None:
    names = (*_COMMON, *_OWN[kind], *_NEUTRAL, *_IGNORED)
    for name, value in values.items():
        if name not in names:
            message = f"unrecognized parameter '{name[:100]}'{hint(name[:100], names)}"
            raise ApiError(400, message, "unknown_parameter", name[:100])
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            message = f"'{name}' is not supported here: leave it out"
            raise ApiError(400, message, "unsupported_parameter", name)


def _take(
    values: Mapping[str, Any], name: str, kind: type, default: Any, low: int | None = None, high: int | None = None
) -> Any:
    value = values.get(name, default)
    if value is default:
        return value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ApiError(400, f"'{name}' must be {kind.__name__}, not {type(value).__name__}", "invalid_type", name)
    if isinstance(value, int) and not (-inf if low is None else low) <= value <= (inf if high is None else high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ApiError(400, f"'{name}' is {value}, but must be {limit}", "invalid_value", name)
    return value


def _chat_state(values: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
    messages = [normalize_chat_message(item, index) for index, item in enumerate(_take(values, "messages", list, []))]
    if faults := find_message_faults(messages):
        raise ApiError(400, "; ".join(faults)[:1000], None, "messages")
    tools, kwargs = _take(values, "tools", list, []), _take(values, "chat_template_kwargs", dict, {})
    for index, tool in enumerate(tools):
        function: Any = tool.get("function") if isinstance(tool, dict) else None
        has_name = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not has_name or not isinstance(function.get("parameters", {}), dict):
            form = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise ApiError(400, f"tools[{index}] must be {form}", "invalid_type", f"tools[{index}]")
    if reserved := kwargs.keys() & set(_RESERVED):
        name = f"chat_template_kwargs.{min(reserved)}"
        raise ApiError(400, f"'{name}' cannot be set", "unsupported_parameter", name)
    shows_tools = bool(tools) and values.get("tool_choice") != "none"
    return messages, {**kwargs, **({"tools": tools} if shows_tools else {})}


def _text_state(values: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
    prompt = values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise ApiError(400, "'prompt' must be one text that is not empty", "invalid_type", "prompt")
    return prompt, {}


def normalize_chat_message(message: Any, index: int = 0) -> Any:
    """Return a message as the chat template gets it: content as one text, arguments of calls as objects."""
    if not isinstance(message, dict):
        return message
    plain = {key: value for key, value in normalize_message(message).items() if value or key not in _EMPTY_KEYS}
    plain |= {"role": "system"} if plain.get("role") == "developer" else {}
    content = plain.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ApiError(400, f"messages[{index}]: only parts of text are supported", None, "messages")
        plain["content"] = "".join(part["text"] for part in content)
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
        return plain
    calls = plain["tool_calls"]
    plain["tool_calls"] = [
        _normalize_call(call, f"messages[{index}].tool_calls[{number}]") for number, call in enumerate(calls)
    ] if isinstance(calls, list) else calls  # fmt: skip
    return plain


def _normalize_call(call: Any, place: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{place}.function.arguments is not JSON: {error}", "invalid_value", place) from None
    if not isinstance(parsed, dict):
        raise ApiError(400, f"{place}.function.arguments must be an object", "invalid_value", place)
    function = {"name": function.get("name"), "arguments": parsed}
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _finish_of(choice: Choice) -> str:
    return "tool_calls" if choice.message.get("tool_calls") and choice.finish == "stop" else choice.finish


def _shown_calls(message: Message) -> list[dict[str, Any]]:
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]


def _logprobs_of(answer: Answer, choice: Choice) -> dict[str, Any] | None:
    if not answer.ask.logprobs:
        return None
    texts, values = choice.token_texts, choice.logprobs
    if answer.ask.kind == "text":
        offsets = [0, *accumulate(map(len, texts))][:-1]
        sampled = [{text: value} for text, value in zip(texts, values, strict=True)]  # vLLM's clients need a list
        return {"tokens": [*texts], "token_logprobs": [*values], "top_logprobs": sampled, "text_offset": offsets}
    rows = zip(texts, values, strict=True)
    content = [{"token": t, "logprob": v, "bytes": [*t.encode()], "top_logprobs": list[Any]()} for t, v in rows]
    return {"content": content, "refusal": None}


def _usage_of(answer: Answer) -> dict[str, int]:
    prompt, sampled = len(answer.prompt_tokens), sum(len(choice.tokens) for choice in answer.choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head_of(answer: Answer, name: str) -> dict[str, Any]:
    return {
        "id": f"{'cmpl' if answer.ask.kind == 'text' else 'chatcmpl'}-{answer.ask.digest.hex()}",
        "object": name,
        "created": answer.created_s,
        "model": MODEL,
        "system_fingerprint": f"version-{answer.version}",
    }


def write_answer(answer: Answer) -> dict[str, Any]:
    """Return the whole answer."""
    is_chat, choices = answer.ask.kind == "chat", []
    for index, choice in enumerate(answer.choices):
        calls = _shown_calls(choice.message)
        content = choice.message.get("content") or (None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}
        shown = {"message": message} if is_chat else {"text": choice.text}
        ids = {"token_ids": [*choice.tokens]} if answer.ask.token_ids else {}
        ended = {"logprobs": _logprobs_of(answer, choice), "finish_reason": _finish_of(choice)}
        choices.append({"index": index, **shown, **ended, **ids})
    ids = {"prompt_token_ids": [*answer.prompt_tokens]} if answer.ask.token_ids else {}
    head = _head_of(answer, "chat.completion" if is_chat else "text_completion")
    return {**head, "choices": choices, "usage": _usage_of(answer), **ids}


def write_chunks(answer: Answer) -> Iterator[bytes]:
    """Yield the events of a streamed answer, which is complete before its first event."""
    is_chat = answer.ask.kind == "chat"
    head = _head_of(answer, "chat.completion.chunk" if is_chat else "text_completion")

    def event(choices: list[Any], **more: Any) -> bytes:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n".encode()

    for index, choice in enumerate(answer.choices):
        logprobs = {"logprobs": _logprobs_of(answer, choice)}
        if not is_chat:
            yield event([{"index": index, "text": choice.text, **logprobs, "finish_reason": _finish_of(choice)}])
            continue
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": choice.message.get("content", "")}]
        deltas += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(_shown_calls(choice.message))]
        for delta in deltas:
            yield event([{"index": index, "delta": delta, **logprobs, "finish_reason": None}])
            logprobs = {"logprobs": None}
        yield event([{"index": index, "delta": {}, "logprobs": None, "finish_reason": _finish_of(choice)}])
    if answer.ask.include_usage:
        yield event([], usage=_usage_of(answer))
    yield b"data: [DONE]\n\n"
