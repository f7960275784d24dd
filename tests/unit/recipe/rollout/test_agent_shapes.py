# SPDX-License-Identifier: Apache-2.0
"""The requests and answers of the agents' endpoint have the types that OpenAI publishes, also for hostile JSON."""

import asyncio
import json
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from dlrover.python.rl.recipe.rollout import chat_api, endpoint
from dlrover.python.rl.recipe.rollout.chat_api import ApiError, Ask, parse_ask
from dlrover.python.rl.runtime import http
from tests.unit.recipe.rollout.test_agent_endpoint import CALL, LIMITS, TOOL, WRONG, act, chat, raw, raw_head, user

PAIR = [user("one"), {"role": "assistant", "content": "two"}]
CALLED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TEXT = {"model": "policy", "prompt": "one"}
EXTENSIONS = {"token_ids", "prompt_token_ids"}  # of vLLM
ANSWERED = {
    "chat": chat(),
    "choices": chat(n=3),
    "log-probs": chat(logprobs=True, max_tokens=2),
    "stop": chat(stop="e"),
    "a tool": chat(tools=[TOOL]),
    "no tool": chat(tools=[TOOL], tool_choice="none"),
    "a tool's answer": chat(
        messages=[user("x"), {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                  {"role": "tool", "tool_call_id": "1", "content": "3"}], tools=[TOOL],
    ),
    "parts": chat(messages=[{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *PAIR, user("y")]),
    "token ids": chat(return_token_ids=True),
    "sampling": chat(temperature=0.1, top_p=0.5, seed=3, user="me", store=False, metadata={}, service_tier="auto"),
    "text": TEXT,
    "text choices": {**TEXT, "n": 2, "logprobs": 0, "stop": ["e"], "echo": False, "best_of": 1},
}  # fmt: skip


def undeclared(value, place=""):
    """Yield the places of fields that a model of ``openai.types`` does not declare."""
    if isinstance(value, BaseModel):
        yield from (f"{place}.{name}" for name in value.model_extra or {} if name not in EXTENSIONS)
        for name in type(value).model_fields:
            yield from undeclared(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from undeclared(each, f"{place}[]")


def checked(model, text):
    value = model.model_validate_json(text, strict=True)
    assert not [*undeclared(value, model.__name__)]
    return value


def path_of(ask):
    return "chat/completions" if "messages" in ask else "completions"


@pytest.mark.feature(151)
@pytest.mark.needs("openai")
def test_answers_and_chunks_are_of_openais_published_types():
    from openai.types import Completion, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    async def run(client):
        answers = {name: await client.post(path_of(ask), ask) for name, ask in ANSWERED.items()}
        streams = {}
        for name, ask in ANSWERED.items():
            if "return_token_ids" not in ask:
                options = {"stream": True, "stream_options": {"include_usage": True}}
                streams[name] = await client.post(path_of(ask), {**ask, **options})
        headers = {"authorization": f"Bearer {client.key}"}
        return answers, streams, await client._http.get(f"{client.url}/models", headers=headers)

    answers, streams, models = act(run, lambda *_: f"yes {CALL}", max_turns=100, max_tokens=5000)
    for name, answer in answers.items():
        assert answer.status_code == 200, (name, answer.text)
        is_chat = "messages" in ANSWERED[name]
        whole = checked(ChatCompletion if is_chat else Completion, answer.text)
        assert len(whole.choices) == ANSWERED[name].get("n", 1)
        assert all(f"x-ratelimit-{limit}" in answer.headers for limit in LIMITS)
        if name in streams:
            *events, done = [line.removeprefix("data: ") for line in streams[name].text.split("\n\n") if line]
            chunks = [checked(ChatCompletionChunk if is_chat else Completion, event) for event in events]
            assert done == "[DONE]" and chunks[-1].usage == whole.usage
            ends = {each.index: each.finish_reason for chunk in chunks for each in chunk.choices}
            assert ends == {each.index: each.finish_reason for each in whole.choices}
    assert json.loads(answers["a tool"].text)["choices"][0]["finish_reason"] == "tool_calls"
    assert [checked(Model, json.dumps(each)).id for each in models.json()["data"]] == ["policy"]


@pytest.mark.feature(151)
@pytest.mark.needs("vllm")
@pytest.mark.filterwarnings("default")
def test_requests_and_answers_are_of_vllms_published_types():
    from vllm.entrypoints.openai.chat_completion import protocol as chats
    from vllm.entrypoints.openai.completion import protocol as texts

    async def run(client):
        return {name: await client.post(path_of(ask), ask) for name, ask in ANSWERED.items()}

    for name, answer in act(run, lambda *_: f"yes {CALL}", max_turns=100, max_tokens=5000).items():
        ask = ANSWERED[name]
        request, whole = (
            (chats.ChatCompletionRequest, chats.ChatCompletionResponse)
            if "messages" in ask
            else (texts.CompletionRequest, texts.CompletionResponse)
        )
        assert request.model_validate(ask).model_fields_set >= ask.keys(), name
        whole.model_validate_json(answer.text, strict=True)


@pytest.mark.feature(155)
@pytest.mark.needs("openai")
def test_errors_are_of_openais_published_type():
    from openai.types.shared import ErrorObject

    async def run(client):
        answers = {name: await client.post("chat/completions", body) for name, (body, *_) in WRONG.items()}
        answers["wrong key"] = await client.post("chat/completions", chat(), "sk-x")
        answers["no key"] = await client._http.post(f"{client.url}/completions", json=TEXT)
        answers["long body"] = await client.post("chat/completions", b" " * (5 << 20))
        answers["another method"] = await client._http.get(f"{client.url}/chat/completions")
        answers["another path"] = await client.post("responses", {})
        return answers

    answers = act(run)
    for name, answer in answers.items():
        assert answer.json().keys() == {"error"}, name
        checked(ErrorObject, json.dumps(answer.json()["error"]))
    statuses = {name: answer.status_code for name, answer in answers.items() if name not in WRONG}
    assert [*statuses.values()] == [401, 401, 413, 405, 404]


def read_error(connection):
    """Return the status of an answer after which the connection ends, its error, and whether to send it again."""
    text = b""
    while part := connection.recv(1 << 16):
        text += part
    head, body = text.decode().split("\r\n\r\n")
    headers = dict(line.lower().split(": ") for line in head.split("\r\n")[1:])
    assert int(headers["content-length"]) == len(body)
    return int(head.split()[1]), json.loads(body)["error"], headers["x-should-retry"]


@pytest.mark.needs("openai")
@pytest.mark.feature(158)
def test_errors_of_the_server_itself_have_openais_shape(monkeypatch):
    from openai.types.shared import ErrorObject

    monkeypatch.setattr(http, "_MOST_CONNECTIONS", 70)

    async def run(client):
        address, head = raw_head(client)
        with ExitStack() as stack:
            parts = {
                "no HTTP": b"hello\r\n\r\n", "large headers": head + b"x: " + b"x" * 100_000, "half": head,
                "a bad length": head + b"content-length: -1\r\n\r\n",
                "a bad chunk": head + b"transfer-encoding: chunked\r\n\r\nx\r\n",
            }  # fmt: skip
            bad = {name: stack.enter_context(raw(address, part)) for name, part in parts.items()}
            errors = {name: await asyncio.to_thread(read_error, connection) for name, connection in bad.items()}
            await client.chat("on a connection that is kept")
            for _ in range(80):
                stack.enter_context(raw(address))
            extra = stack.enter_context(raw(address, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
            errors["many"] = await asyncio.to_thread(read_error, extra)
            assert (await client.post("chat/completions", chat())).status_code == 200, "an earlier connection is used"
        return errors

    errors = act(run, patience_s=3.0)
    for name, (_, error, _) in errors.items():
        assert checked(ErrorObject, json.dumps(error)).message, name
    statuses = {name: (status, retry) for name, (status, _, retry) in errors.items()}
    assert statuses.pop("half") == (408, "false") and statuses.pop("many") == (503, "true")
    assert {*statuses.values()} == {(400, "false")}


def test_a_fault_of_the_endpoint_has_openais_shape(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    async def run(client):
        monkeypatch.setattr(endpoint, "parse_ask", fail)
        answer = await client.post("chat/completions", chat())
        monkeypatch.undo()
        return answer

    answer = act(run)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.feature(151)
@pytest.mark.needs("openai")
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_every_published_parameter_is_known(kind):
    from openai.types import completion_create_params as text_params
    from openai.types.chat import completion_create_params as chat_params

    params = {"chat": chat_params, "text": text_params}[kind]
    base, streaming = params.CompletionCreateParamsBase, params.CompletionCreateParamsStreaming
    for name in {**base.__annotations__, **streaming.__annotations__}:
        if name in (*chat_api._COMMON, *chat_api._OWN[kind], *chat_api._IGNORED):
            continue
        with pytest.raises(ApiError, match=f"'{name}' is not supported here") as refused:
            parse_ask(kind, json.dumps({**(chat() if kind == "chat" else TEXT), name: object_of(name)}).encode())
        assert refused.value.body["code"] == "unsupported_parameter"


def object_of(name):
    """Return a value that has an effect."""
    return {"function_call": {"name": "add"}, "tool_choice": "required"}.get(name, [{"type": "x"}])


NAMES = (*chat_api._COMMON, *chat_api._OWN["chat"], *chat_api._OWN["text"], *chat_api._NEUTRAL, *chat_api._IGNORED)
KEYS = (
    "role",
    "content",
    "tool_calls",
    "function",
    "arguments",
    "name",
    "type",
    "text",
    "tool_call_id",
    "include_usage",
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.floats() | st.text(max_size=4)
    | st.sampled_from(["user", "assistant", "tool", "text", "{}", "{", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.feature(155)
@settings(max_examples=400, deadline=None)
@given(kind=st.sampled_from(["chat", "text"]), changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_any_json_becomes_a_request_or_one_error(kind, changes):
    body = json.dumps({**(chat() if kind == "chat" else TEXT), **changes}).encode()
    try:
        ask = parse_ask(kind, body)
    except ApiError as error:
        assert error.status in (400, 404) and json.dumps(error.body)
    else:
        assert isinstance(ask, Ask) and len(ask.digest) == 16
