# SPDX-License-Identifier: Apache-2.0
"""The endpoint of agents answers in OpenAI's shapes, and hostile clients do not disturb others."""

import asyncio
import inspect
import json
import resource
import socket
from contextlib import ExitStack

import httpx
import pytest
from transformers import PreTrainedTokenizerBase

from dlrover.python.rl.recipe.rollout.chat_api import ApiError, parse_ask
from dlrover.python.rl.recipe.rollout.endpoint import _Answering, _Episode
from tests.support.agent_clients import acting, user
from tests.support.scripted import groups

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"first": 2}}</tool_call>'
ONE = {"model": "policy", "messages": [user("one")]}
LIMITS = ("limit-requests", "remaining-requests", "limit-tokens", "remaining-tokens", "reset-seconds")


def act(run, say=lambda *_: "yes", **settings):
    """Run one agent and return what it returned as ``seen``."""
    seen = []

    async def collecting(client, row):
        await client.chat("so that there is an action")
        seen.append(await run(client))
        return 1.0

    with acting(say, collecting, **settings) as rolled:
        rolled.fetch(groups({}))
    return seen[0]


def raw(address, *parts):
    connection = socket.create_connection(address, timeout=30.0)
    for part in parts:
        connection.sendall(part)
    return connection


def raw_head(client):
    """Return the address of a client's endpoint, and the head of its request without the length."""
    host, port = client.url.split("/")[2].split(":")
    path = f"/{client.url.split('/', 3)[3]}/chat/completions"
    return (host, int(port)), f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {client.key}\r\n".encode()


@pytest.mark.feature(151)
def test_chat_completion_has_every_field():
    async def run(client):
        return await client.post("chat/completions", {**ONE, "logprobs": True, "stop": ["#"], "max_tokens": 50})

    answer = act(run, max_tokens=500)
    body = answer.json()
    assert body.pop("id").startswith("chatcmpl-") and isinstance(body.pop("created"), int)
    (choice,) = body.pop("choices")
    content = choice.pop("logprobs")["content"]
    assert [item["token"] for item in content] == ["y", "e", "s", "<|im_end|>"]
    assert content[0] == {"token": "y", "logprob": -1.0, "bytes": [121], "top_logprobs": []}
    message = {"role": "assistant", "content": "yes", "refusal": None}
    assert choice == {"index": 0, "message": message, "finish_reason": "stop"}
    prompt = body["usage"]["prompt_tokens"]
    assert body == {
        "object": "chat.completion", "model": "policy", "system_fingerprint": "version-0",
        "usage": {"prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4},
    }  # fmt: skip
    limits = [int(answer.headers[f"x-ratelimit-{name}"]) for name in LIMITS]
    assert limits[:4] == [8, 6, 500, 492] and 0 < limits[4] <= 600


@pytest.mark.feature(151)
def test_text_completion_has_every_field():
    async def run(client):
        options = {"logprobs": 0, "return_token_ids": True, "max_tokens": 2}
        return await client.text("ask: ", **options)

    body = act(run)
    logprobs = {"tokens": ["y", "e"], "token_logprobs": [-1.0, -1.0], "top_logprobs": [{"y": -1.0}, {"e": -1.0}]}
    logprobs["text_offset"] = [0, 1]
    choice = {"index": 0, "text": "ye", "logprobs": logprobs, "finish_reason": "length", "token_ids": [121, 101]}
    assert (body["object"], body["choices"]) == ("text_completion", [choice])
    assert body["prompt_token_ids"] == [*b"ask: "]


@pytest.mark.feature(154)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_streamed_answer_has_the_chunks_of_the_whole_one(path):
    async def run(client):
        ask = {**ONE, "tools": [TOOL]} if path[1] == "h" else {"model": "policy", "prompt": "one"}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return [await client.post(path, ask), await client.post(path, {**ask, **options})]

    whole, streamed = act(run, lambda *_: f"I add. {CALL}")
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *lines, done = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    chunks, body = [json.loads(line) for line in lines], whole.json()
    assert done == "[DONE]" and {chunk["id"] for chunk in chunks} == {body["id"]}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == body["usage"]
    if path[1] == "o":
        assert chunks[0]["choices"][0]["text"] == body["choices"][0]["text"]
        return
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "I add."}
    assert deltas[1]["tool_calls"] == [{"index": 0, **body["choices"][0]["message"]["tool_calls"][0]}]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def chat(**changed):
    return {**ONE, **changed}


BAD_CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{"}}]}
WRONG = {
    "unknown model": (chat(model="gpt-4"), 404, "model_not_found", "model"),
    "no model": ({"messages": [user("one")]}, 404, "model_not_found", "model"),
    "not JSON": (b"{", 400, None, None),
    "deep": (b"[" * 100_000, 400, None, None),
    "a list": ([1], 400, None, None),
    "no messages": ({"model": "policy"}, 400, None, "messages"),
    "unknown role": (chat(messages=[{"role": "usr", "content": "x"}]), 400, None, "messages"),
    "an image": (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, None, "messages"),
    "arguments that are not JSON": (
        chat(messages=[user("x"), BAD_CALL]), 400, "invalid_value", "messages[1].tool_calls[0]",
    ),
    "a tool without a name": (chat(tools=[{"type": "function", "function": {}}]), 400, "invalid_type", "tools[0]"),
    "a tool that is text": (chat(tools=["add"]), 400, "invalid_type", "tools[0]"),
    "unknown parameter": (chat(max_token=3), 400, "unknown_parameter", "max_token"),
    "penalty": (chat(frequency_penalty=1.5), 400, "unsupported_parameter", "frequency_penalty"),
    "JSON mode": (chat(response_format={"type": "json_object"}), 400, "unsupported_parameter", "response_format"),
    "forced tool": (chat(tool_choice="required"), 400, "unsupported_parameter", "tool_choice"),
    "top log-probs": (chat(logprobs=True, top_logprobs=5), 400, "unsupported_parameter", "top_logprobs"),
    "ids in a stream": (
        chat(stream=True, return_token_ids=True), 400, "unsupported_parameter", "return_token_ids",
    ),
    "no tokens": (chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    "text as a number": (chat(max_tokens="3"), 400, "invalid_type", "max_tokens"),
    "many choices": (chat(n=1000), 400, "invalid_value", "n"),
    "many stops": (chat(stop=[*"abcde"]), 400, None, "stop"),
    "empty stop": (chat(stop=""), 400, None, "stop"),
    "too long": (chat(messages=[user("x" * 5000)]), 400, "context_length_exceeded", "messages"),
    "too many actions": (chat(n=16), 429, "max_turns", None),
}  # fmt: skip


@pytest.mark.feature(155)
def test_wrong_requests_get_one_error_in_openais_shape():
    async def run(client):
        answers = {}
        for name, (body, *_) in WRONG.items():
            answers[name] = await client.post("chat/completions", body)
        answers["last"] = await client.post("chat/completions", ONE)
        return answers

    answers = act(run)
    assert answers.pop("last").status_code == 200
    for name, answer in answers.items():
        _, status, code, param = WRONG[name]
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), (name, answer.text)
        assert error["message"] and error["type"] in ("invalid_request_error", "insufficient_quota"), name
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.feature(155)
def test_parameters_of_the_call_are_no_variables_of_the_template():
    call = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"self", "kwargs"}
    for name in (*call, "messages"):
        with pytest.raises(ApiError, match=f"'chat_template_kwargs.{name}' cannot be set"):
            parse_ask("chat", json.dumps(chat(chat_template_kwargs={name: "x"})).encode())
    ask = parse_ask("chat", json.dumps(chat(chat_template_kwargs={"enable_thinking": True})).encode())
    assert ask.template_kwargs == {"enable_thinking": True}


@pytest.mark.feature(155)
def test_texts_of_prompts_and_other_addresses_are_checked():
    async def run(client):
        bodies = ({"prompt": ""}, {"prompt": ["a", "b"]}, {"prompt": "x", "logprobs": 3}, {"prompt": "x", "echo": True})
        answers = [await client.post("completions", {"model": "policy", **body}) for body in bodies]
        return [*answers, await client.post("embeddings", {}), await client.post("models", {})]

    answers = act(run)
    assert [answer.status_code for answer in answers] == [400] * 4 + [404, 405]
    assert all(answer.json()["error"].keys() == {"message", "type", "param", "code"} for answer in answers)
    assert {answer.headers["x-should-retry"] for answer in answers} == {"false"}


@pytest.mark.feature(156)
def test_limit_of_tokens_cuts_the_last_action():
    async def run(client):
        asks = [chat(messages=[user("a")]), chat(max_tokens=20, messages=[user("b")]), chat(messages=[user("c")])]
        return [await client.post("chat/completions", each) for each in (*asks, chat(messages=[user("d")]))]

    *answered, spent = act(run, lambda *_: "x" * 40, max_tokens=41 + 41 + 20 + 8)
    assert [answer.json()["usage"]["completion_tokens"] for answer in answered] == [41, 20, 8]
    assert [answer.json()["choices"][0]["finish_reason"] for answer in answered] == ["stop", "length", "length"]
    assert (spent.status_code, spent.json()["error"]["code"]) == (429, "max_tokens")


@pytest.mark.feature(156)
def test_requests_beyond_the_open_ones_may_be_sent_again():
    async def run(client):
        address, head = raw_head(client)
        for number in range(50):  # until the half request has come first
            with raw(address, head + b"content-length: 100\r\n\r\n{"):
                await asyncio.sleep(0.1)
                answer = await client.post("chat/completions", chat(messages=[user(f"{number}")]))
            if answer.status_code != 200:
                break
        return answer

    refused = act(run, max_open=1, max_turns=300)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (refused.json()["error"]["type"], refused.headers["x-should-retry"]) == ("requests", "true")


@pytest.mark.feature(156)
def test_tokens_that_open_requests_may_need_are_not_yet_spent():
    async def run(client, row):
        first = asyncio.create_task(client.chat("one"))
        while not rolled.engine.seeds:
            await asyncio.sleep(0.01)
        refused = await client.post("chat/completions", chat(messages=[user("two")]))
        holds.clear()
        await first
        await client.chat("two")
        return {"reward": 1.0, "score": float(refused.json()["error"]["code"] == "rate_limit_exceeded")}

    holds = [True]
    with acting(lambda *_: "yes", run, max_tokens=100) as rolled:
        advance = rolled.engine.advance
        rolled.engine.advance = lambda: [] if holds else advance()
        rows = rolled.fetch(groups({}))
    assert (rows.dense("score").sum(), rows.dense("turns").tolist()[0]) == (1.0, 2)


@pytest.mark.feature(156)
async def test_request_is_open_until_its_answer_is_read():
    episode, is_read = _Episode(None, "", open=1), asyncio.Event()

    async def send(message):
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await is_read.wait()

    answering = _Answering(episode, [b"{}"], "application/json", {})
    sending = asyncio.create_task(answering({"type": "http"}, asyncio.Event().wait, send))
    await asyncio.sleep(0.05)
    assert episode.open == 1
    is_read.set()
    await sending
    assert episode.open == 0


@pytest.mark.feature(156)
def test_key_opens_its_episode_only_and_ends_with_it():
    clients, both = [], asyncio.Event()

    async def run(client, row):
        clients.append(client)
        both.set() if len(clients) == 2 else await both.wait()
        other = next(each for each in clients if each is not client)
        for key, url in (("sk-x", None), (other.key, None), (client.key, other.url), ("ключ", None)):
            answer = await client.post("chat/completions", ONE, key, url)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
            assert error["type"] == "invalid_request_error"
        await client.chat("one")
        return 1.0

    with acting(lambda *_: "yes", run) as rolled:
        rows = rolled.fetch(groups({}, {}))
        assert rows.objects("error") == [None, None]
        headers = {"authorization": f"Bearer {clients[0].key}"}
        assert httpx.post(f"{clients[0].url}/chat/completions", json=ONE, headers=headers).status_code == 401
    assert len({client.key for client in clients}) == 2 and min(len(client.key) for client in clients) > 40


@pytest.mark.feature(158)
def test_hostile_clients_get_one_error_and_disturb_no_others():
    """1,000 idle connections, bodies of 100 MB, and a client that never reads."""
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    async def run(client):
        address, head = raw_head(client)
        with ExitStack() as stack:
            for _ in range(1000):
                stack.enter_context(raw(address))
            whole = json.dumps({**ONE, "stream": True}).encode()
            stack.enter_context(raw(address, head + f"content-length: {len(whole)}\r\n\r\n".encode() + whole))
            long = [client.post("chat/completions", b" " * 100_000_000, key) for key in (None, "sk-wrong")]
            long = [asyncio.create_task(each) for each in long]
            await client.chat("me, too")
            return [(await each).status_code for each in long]

    assert act(run, patience_s=200.0) == [413, 401]
    grown_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mb
    assert grown_mb < 600, "the client's own 200 MB, and bounded buffers"


@pytest.mark.feature(158)
def test_half_requests_and_idle_connections_end_after_a_while():
    async def run(client):
        address, head = raw_head(client)
        halves = (head + b"content-length: 100\r\n\r\n{", head[:20])
        with ExitStack() as stack:
            half = [stack.enter_context(raw(address, part)) for part in halves]
            idle = stack.enter_context(raw(address))
            answers = [await asyncio.to_thread(each.recv, 4096) for each in half]
            return [answer.split(b"\r\n")[0] for answer in answers], await asyncio.to_thread(idle.recv, 1)

    lines, nothing = act(run, patience_s=1.0)
    assert all(b" 408 " in line for line in lines) and nothing == b""
