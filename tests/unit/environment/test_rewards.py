# SPDX-License-Identifier: Apache-2.0
"""Several reward functions as one, and a language model as the judge."""

import asyncio
import json
import re
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from dlrover.python.rl.common.by_value import name_for, readable_name
from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.core.functions import count_abandoned
from dlrover.python.rl.environment.core.scoring import Completed, Reward, RewardFunction, WeightedRewards
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier, VerifierPool
from dlrover.python.rl.environment.verifiers.llm_judge import LLMJudge
from tests.support import verifiers
from tests.support.manual_clock import within


def length(completion, answer, extra_info):
    return len(completion)


async def soon(completion, answer, extra_info):
    await asyncio.sleep(0.2)
    return extra_info.get("soon", 1)


def slowly(completion, answer, extra_info):
    time.sleep(0.2)
    return 1.0


FUNCTIONS = {"length": length, "soon": soon}


def test_rewards_are_the_weighted_sum_of_functions():
    rewards = WeightedRewards(FUNCTIONS, {"length": 0.5, "soon": -2.0})
    sample = Completed("four", None, {"soon": 3})
    expected = Reward(0.5 * 4 - 2.0 * 3, {"length": 4.0, "soon": 3.0})
    assert [*rewards.now([sample]), asyncio.run(rewards.score(sample))] == [expected, expected]


def test_rewards_run_functions_side_by_side():
    functions = {f"{name}{at}": function for name, function in (("a", soon), ("b", slowly)) for at in range(3)}
    rewards = WeightedRewards(functions, dict.fromkeys(functions, 1.0))
    with within(1.0):
        assert asyncio.run(rewards.score(Completed("x"))).total == 6.0


async def test_rewards_abandoned_block_no_others_and_are_counted():
    stop, before = threading.Event(), count_abandoned()
    hanging = WeightedRewards({"hangs": lambda *_: float(stop.wait(60))}, {"hangs": 1.0})
    fine = WeightedRewards({"length": length}, {"length": 1.0})
    scores = (asyncio.wait_for(hanging.score(Completed("x")), 0.2) for _ in range(50))
    try:
        gone = await asyncio.gather(*scores, return_exceptions=True)
        async with asyncio.timeout(20):
            assert (await fine.score(Completed("four"))).total == 4.0
        assert ({*map(type, gone)}, count_abandoned() - before) == ({TimeoutError}, 50)
    finally:
        stop.set()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_need_finite_parts_and_weights(bad):
    for weights in ({}, {"length": 1.0}, {"length": 1.0, "soon": bad}):
        with pytest.raises(ValueError, match="weight"):
            WeightedRewards(FUNCTIONS, weights)
    rewards = WeightedRewards(FUNCTIONS, {"length": 1.0, "soon": 0.0})
    with pytest.raises(VerifierError, match="which is not a reward: soon"):
        rewards.now([Completed("x", None, {"soon": bad})])


def test_rewards_refuse_text_and_name_the_function(tmp_path):
    name = name_for(lambda completion: "0.5", tmp_path)
    with pytest.raises(VerifierError, match=r"^returned the text '0.5', which is not a reward$"):
        WeightedRewards.load({name: 1.0}).now([Completed("x")])
    with pytest.raises(VerifierError, match=r"^returned the text '0.5', which is not a reward: lambda$"):
        WeightedRewards.load({name: 1.0, f"{__name__}:later_in_batches": 1.0}).now([Completed("x")])
    assert readable_name("some.module:function") == "some.module:function"


@pytest.mark.parametrize(
    ("function", "nearest"),
    [
        (lambda completion, grade: ..., "grad"),
        (lambda completions, prompts, grade, **columns: ..., "grad"),
        (lambda completion, /, grade: ..., "grad"),
        (lambda completions, prompt: ..., "prompts"),
        (lambda completion, grade=1: ..., ""),
        (lambda text, gold, info: ..., ""),
    ],
)
def test_reward_function_misses_columns_beforehand(function, nearest):
    message = RewardFunction(function).find_missing({"grad"})
    assert f"did you mean '{nearest}'" in message if nearest else message == ""
    assert nearest == "prompts" or RewardFunction(function).find_missing({"grade"}) == ""


TALK = [{"role": "user", "content": "6 x 7?"}]
SAMPLE = Completed("42", "42", {"difficulty": 3}, "6 x 7?")


def by_keyword(*, prompt, completion, extra_info):
    return prompt, completion, extra_info


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda text, gold, info: (text, gold, info), ("42", "42", {"difficulty": 3})),
        (lambda text: text, "42"),
        (lambda completion, answer: (completion, answer), ("42", "42")),
        (lambda completion, /, difficulty: difficulty, 3),
        (lambda text, difficulty, unknown=5: (text, difficulty, unknown), ("42", 3, 5)),
        (by_keyword, ("6 x 7?", "42", {"difficulty": 3})),
        (lambda text, **columns: (text, columns["difficulty"], columns["prompt"]), ("42", 3, "6 x 7?")),
        (lambda *fields: fields, ("42", "42", {"difficulty": 3})),
    ],
)
def test_reward_function_is_called_by_its_signature(function, arguments):
    RewardFunction(function).check("mine")
    assert RewardFunction(function).on(SAMPLE) == arguments


def test_reward_function_of_verl_is_called_by_its_names():
    row = {"data_source": "gsm8k", "solution_str": "40"}
    sample = Completed("42", "43", row, "6 x 7?")
    verls = RewardFunction(lambda data_source, solution_str, ground_truth, extra_info=None: [*locals().values()])
    of_gsm8k = RewardFunction(lambda solution_str, ground_truth, method="strict", score=1.0: [*locals().values()])
    assert verls.on(sample) == ["gsm8k", "42", "43", row]
    assert of_gsm8k.on(sample) == ["42", "43", "strict", 1.0]
    assert verls.find_missing(row) == of_gsm8k.find_missing({}) == ""
    assert "'data_source', which is not a column of its row" in verls.find_missing({"level"})


def test_reward_function_column_of_null_has_its_default():
    def function(text, answer, level=1):
        return answer, level

    scored = RewardFunction(function, ["level", "source"])
    for row, level in ({"level": 3}, 3), ({"source": "x"}, 1), ({}, 1):
        assert scored.on(SAMPLE._replace(extra_info=row)) == ("42", level)
    assert scored.find_missing(["source"]) == ""
    assert RewardFunction(function, ["source"]).on(SAMPLE) == ("42", SAMPLE.extra_info)


def test_verifier_process_knows_the_columns_of_all_rows():
    with DeadlineVerifier("tests.support.verifiers:level", timeout_s=20, columns={"level"}) as verifier:
        assert [verifier("x", None, row) for row in ({"level": 3}, {})] == [3.0, 1.0]


def test_reward_function_takes_the_sample_before_columns():
    row = {**SAMPLE.extra_info, "prompt": "?", "completion": "41", "response": "40"}
    sample = SAMPLE._replace(extra_info=row)
    assert RewardFunction(by_keyword).on(sample) == ("6 x 7?", "42", row)
    assert RewardFunction(lambda response, difficulty: (response, difficulty)).on(sample) == ("42", 3)


def test_reward_function_names_a_missing_column():
    with pytest.raises(VerifierError, match="needs 'dificulty', .* did you mean 'difficulty'"):
        RewardFunction(lambda text, dificulty: 1.0).on(SAMPLE)
    with pytest.raises(VerifierError, match="'mine' takes no completion"):
        RewardFunction(lambda: 1.0).check("mine")


def in_batches(prompts, completions, difficulty, **columns):
    assert columns["answer"] == ["42"] * len(prompts)
    return [None if grade > 3 else len(set(map(str, completions))) for grade in difficulty]


async def later_in_batches(completions, **_):
    await asyncio.sleep(0)
    return [1.0] * len(completions)


def test_reward_function_of_trl_gets_all_samples_at_once():
    rewards = WeightedRewards({"a": in_batches, "b": later_in_batches}, {"a": 1.0, "b": 2.0})
    assert rewards.compares
    samples = [SAMPLE, SAMPLE._replace(completion="41", extra_info={"difficulty": 4}), SAMPLE]
    assert [reward.total for reward in rewards.now(samples)] == [2.0 + 2.0, 2.0, 2.0 + 2.0]
    assert asyncio.run(rewards.score(SAMPLE)) == Reward(3.0, {"a": 1.0, "b": 1.0})
    with pytest.raises(VerifierError, match="returned 1 rewards for 2 completions$"):
        WeightedRewards({"short": lambda completions: [1.0]}, {"short": 1.0}).now([SAMPLE, SAMPLE])


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda completions: 0.5, "0.5"),
        (lambda completions: "0.5", "'0.5'"),
        (lambda completions: {"a": 1.0, "b": 2.0}, "{'a': 1.0, 'b': 2.0}"),
        (lambda completions: np.array(0.5), "array(0.5)"),
    ],
)
def test_reward_function_of_trl_must_return_a_list(function, shown):
    message = f"returned {shown}, not a list of 2: a function of 'completions' must return a number for each"
    with pytest.raises(VerifierError, match=f"^{re.escape(message)}: one$"):
        WeightedRewards({"one": function, "a": in_batches}, {"one": 1.0, "a": 1.0}).now([SAMPLE, SAMPLE])


@pytest.mark.parametrize(("prompt", "shown"), [("6 x 7?", "42"), (TALK, [{"role": "assistant", "content": "42"}])])
def test_reward_function_of_trl_sees_messages(prompt, shown):
    def judge(prompts, completions):
        assert (prompts, completions) == ([prompt], [shown])
        return [1.0]

    assert RewardFunction(judge).on_all([SAMPLE._replace(prompt=prompt)]) == [1.0]


def test_rewards_run_in_a_verifier_process_by_name():
    weights = {"tests.support.verifiers:length": 0.25, "tests.support.verifiers:awaited": 2.0}
    with DeadlineVerifier(weights, timeout_s=20) as verifier:
        (reward,) = verifier.score_all([Completed("four", None, {"bonus": 4})])
        assert reward == Reward(0.25 * 8 + 2.0 * 5, dict(zip(weights, (8.0, 5.0), strict=True)))
        assert verifier("four", None) == 1.0 + 10.0
    with pytest.raises(VerifierError, match=r"verifiers:length \+ tests.support.verifiers:lenth could not be loaded"):
        DeadlineVerifier({verifiers.length: 1.0, "tests.support.verifiers:lenth": 1.0}, timeout_s=20)


def test_verifier_process_is_asked_once_for_a_batch():
    pool = VerifierPool(2, partial(DeadlineVerifier, "tests.support.verifiers:place_in_batch", timeout_s=20))
    try:
        assert [reward.total for reward in pool.score(Completed(text) for text in "abc")] == [0.0, 1.0, 2.0]
        for error in pool.score([Completed("a"), Completed("raise")]):
            assert str(error).startswith("tests.support.verifiers:place_in_batch raised ValueError: not this")
        for error in pool.score([Completed("one")]):
            assert "place_in_batch returned 1.0, not a list of 1: a function" in str(error)
        assert pool.score([]) == []
    finally:
        pool.close()


class Handler(BaseHTTPRequestHandler):
    """Answers with the next of the server's ``replies``, text or a status; the last one is repeated."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        replies = self.server.replies
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
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
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads, running.url = True, f"http://127.0.0.1:{running.server_port}/v1"
        running.replies, running.requests = [r"Good. \boxed{8}"], []
        threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
        yield running
        running.shutdown()


def ask_judge(judge, completion="4", answer="4", **info):
    return asyncio.run(judge(completion, answer, info))


def test_judge_turns_a_mark_into_a_reward(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    judge = LLMJudge(server.url, "big", api_key_env="JUDGE_KEY")
    assert ask_judge(judge, "It is {answer} \\boxed{10}", "four", question="2+2?") == 0.8
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer sk-1"
    assert (body["model"], body["temperature"]) == ("big", 0.0)
    for part in ("2+2?", "It is {answer} \\boxed{10}", "Reference answer:\nfour"):  # filled in once
        assert part in body["messages"][0]["content"]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    ask_judge(LLMJudge(server.url, "m"))
    assert "Authorization" not in server.requests[1][1]
    server.shutdown()
    server.server_close()
    with pytest.raises(VerifierError, match="gave no mark: ConnectError"):
        ask_judge(LLMJudge(server.url, "m", attempts=1, timeout_s=5))


@pytest.mark.slow
def test_judge_asks_again_without_a_mark(server):
    server.replies = [503, "no mark here", r"\boxed{11}", r"\boxed{5}"]
    assert ask_judge(LLMJudge(server.url, "m", attempts=4)) == 0.5
    assert len(server.requests) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replies", "message", "count"),
    [
        ([401], "refuses: 401", 1),
        ([500], "gave no mark: 500", 2),
        ([r"\boxed{-1}"], "no mark from 0 to 10", 2),
        ([r"\boxed{9**9**9}"], "no mark from 0 to 10", 2),
    ],
)
def test_judge_without_a_mark_gives_no_reward(server, replies, message, count):
    server.replies = replies
    with pytest.raises(VerifierError, match=message):
        ask_judge(LLMJudge(server.url, "m", attempts=2))
    assert len(server.requests) == count


def test_judge_is_a_reward_function_among_others(server):
    rewards = WeightedRewards({"judge": LLMJudge(server.url, "m"), "one": lambda *_: 1.0}, {"judge": 1.0, "one": 0.5})
    assert asyncio.run(rewards.score(Completed("4", "4"))).total == pytest.approx(1.3)
    assert rewards.now([Completed("4", "4")])[0].parts == {"judge": 0.8, "one": 1.0}


def test_judge_takes_no_mark_from_thoughts_or_cut_replies(server):
    server.replies = [r"The student says \boxed{10}. Let me see whether ...", r"<think>\boxed{10}</think> \boxed{3}"]
    assert ask_judge(LLMJudge(server.url, "judge")) == 0.3
    for end in ("</think> Wrong.", ""):
        server.replies = [rf"<think>The student says \boxed{{10}}.{end}"]
        with pytest.raises(VerifierError, match="no mark from 0 to 10"):
            ask_judge(LLMJudge(server.url, "judge", attempts=1))


def test_judge_is_asked_about_the_answer_behind_thoughts(server):
    judge = LLMJudge(server.url, "m", template="{completion}")
    samples = [Completed("<think>a</think>b"), Completed("c", think_prefix="<think>\n"), Completed("d</think>")]
    rewards = WeightedRewards({"judge": judge}, {"judge": 1.0})
    values = [rewards.now([sample])[0].total for sample in [*samples, samples[0]._replace(think_prefix=None)]]
    assert values == [0.8, 0.0, 0.8, 0.8]
    assert ask_judge(judge, "<think>e") == 0.0
    assert [body["messages"][0]["content"] for _, _, body in server.requests] == ["b", "", "<think>a</think>b"]
