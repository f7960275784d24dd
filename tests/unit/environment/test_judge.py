# SPDX-License-Identifier: Apache-2.0
"""A language model as the judge, over a server on this machine."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.core.scoring import Completed, WeightedRewards
from dlrover.python.rl.environment.verifiers.llm_judge import LLMJudge


class Server(ThreadingHTTPServer):
    """Answers with what ``replies`` holds, the last one again and again: text, or a status."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.requests = [r"Good. \boxed{8}"], []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.requests.append((self.path, dict(self.headers), body))
        reply = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
        status, text = (200, reply) if isinstance(reply, str) else (reply, "no")
        choice = {"message": {"content": text}, "finish_reason": "length" if text.endswith("...") else "stop"}
        content = json.dumps({"choices": [choice]} if status == 200 else {"error": text})
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture
def server():
    with Server() as running:
        yield running
        running.shutdown()


def ask(judge, completion="4", answer="4", **info):
    return asyncio.run(judge(completion, answer, info))


def test_a_mark_becomes_a_reward(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    judge = LLMJudge(server.url, "big", api_key_env="JUDGE_KEY")
    assert ask(judge, "It is {answer} \\boxed{10}", "four", question="2+2?") == 0.8
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer sk-1"
    assert (body["model"], body["temperature"]) == ("big", 0.0)
    asked = body["messages"][0]["content"]
    assert "2+2?" in asked
    assert "It is {answer} \\boxed{10}" in asked  # Nothing of the completion is filled in.
    assert "Reference answer:\nfour" in asked


def test_without_a_key_none_is_sent(server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    ask(LLMJudge(server.url, "m"))
    assert "Authorization" not in server.requests[0][1]


@pytest.mark.slow
def test_a_busy_server_and_a_reply_without_a_mark_are_asked_again(server):
    server.replies = [503, "no mark here", r"\boxed{11}", r"\boxed{5}"]
    assert ask(LLMJudge(server.url, "m", attempts=4)) == 0.5
    assert len(server.requests) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replies", "what", "count"),
    [
        ([401], "refuses: 401", 1),
        ([500], "gave no mark: 500", 2),
        ([r"\boxed{-1}"], "no mark from 0 to 10", 2),
        ([r"\boxed{9**9**9}"], "no mark from 0 to 10", 2),
    ],
)
def test_no_mark_is_no_reward(server, replies, what, count):
    server.replies = replies
    with pytest.raises(VerifierError, match=what):
        ask(LLMJudge(server.url, "m", attempts=2))
    assert len(server.requests) == count


def test_a_server_that_is_not_there(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(VerifierError, match="gave no mark: ConnectError"):
        ask(LLMJudge(server.url, "m", attempts=2, timeout_s=5))


def test_a_judge_is_a_reward_function_among_others(server):
    rewards = WeightedRewards({"judge": LLMJudge(server.url, "m"), "one": lambda *_: 1.0}, {"judge": 1.0, "one": 0.5})
    assert asyncio.run(rewards.score(Completed("4", "4"))).total == pytest.approx(1.3)
    assert rewards.now([Completed("4", "4")])[0].parts == {"judge": 0.8, "one": 1.0}


def test_a_box_in_a_thought_or_in_a_reply_that_was_cut_is_no_mark(server):
    server.replies = [
        r"The student says \boxed{10}. Let me see whether that is ...",
        r"<think>\boxed{10}</think> \boxed{3}",
    ]
    assert ask(LLMJudge(server.url, "judge")) == 0.3
    server.replies = [r"<think>The student says \boxed{10}.</think> Wrong."]
    with pytest.raises(VerifierError, match="no mark from 0 to 10"):
        ask(LLMJudge(server.url, "judge", attempts=1))
    server.replies = [r"<think>The student says \boxed{10}."]
    with pytest.raises(VerifierError, match="no mark from 0 to 10"):
        ask(LLMJudge(server.url, "judge", attempts=1))


def test_a_judge_is_asked_about_the_answer_behind_thoughts(server):
    judge = LLMJudge(server.url, "m", template="{completion}")
    samples = [Completed("<think>a</think>b"), Completed("c", think_prefix="<think>\n"), Completed("d</think>")]
    rewards = WeightedRewards({"judge": judge}, {"judge": 1.0})
    values = [rewards.now([sample])[0].total for sample in [*samples, samples[0]._replace(think_prefix=None)]]
    assert values == [0.8, 0.0, 0.8, 0.8]
    assert ask(judge, "<think>e") == 0.0
    assert [body["messages"][0]["content"] for _, _, body in server.requests] == ["b", "", "<think>a</think>b"]
