# SPDX-License-Identifier: Apache-2.0
"""Requests of agents become trajectories: which tokens are trained, what is sampled again, and what is remembered."""

import asyncio
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from dlrover.python.rl.common.errors import EngineError, EnvironmentLost
from dlrover.python.rl.engine.api.base import Completion, Request
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.environment.sandbox.environment_process import IsolatedEnvironment
from dlrover.python.rl.recipe.rollout.episodes import Group
from dlrover.python.rl.recipe.rollout.kept_samples import KeptSamples, completed
from tests.support.agent_clients import acting, user
from tests.support.chat_environments import TEMPLATE  # noqa: F401 - what the texts below are rendered with
from tests.support.scripted import groups, texts

CALL = '<tool_call>\n{"name": "add", "arguments": {"first": 2}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
END = "<|im_end|>"


def echo(context, index):
    """Say the number of characters of the context, so that other contexts have other actions."""
    return f"len {len(context)}"


def run_one(run, say=echo, infos=({},), **settings):  # noqa: B006 -- nothing changes them
    with acting(say, run, **settings) as rolled:
        return rolled.fetch(groups(*infos)), rolled


def whole_texts(rows, tokenizer):
    return [tokenizer.decode(row) for row in rows.ragged("tokens")]


@pytest.mark.feature(152)
def test_request_that_extends_keeps_tokens_and_encodes_the_rest():
    async def run(client, row):
        first, _ = await client.chat("one")
        second, _ = await client.chat("one", first, "two")
        return {"reward": 2.0, "score": 0.5}

    rows, rolled = run_one(run)
    (whole,) = whole_texts(rows, rolled.engine.tokenizer)
    first, second = texts(rows, "action_mask")[0].split(END)[:2]
    head = f"<|im_start|>user\none{END}\n<|im_start|>assistant\n{first}{END}\n<|im_start|>user\ntwo{END}\n"
    assert whole == f"{head}<|im_start|>assistant\n{second}{END}"
    assert (rows.dense("reward").tolist(), rows.dense("score").tolist(), rows.objects("error")) == (
        [2.0],
        [0.5],
        [None],
    )
    assert rows.dense("turns").tolist() == [2]
    assert rows.ragged("token_rewards")[0].tolist()[-1] == 2.0


@pytest.mark.feature(154)
def test_tool_calls_are_returned_and_results_continue_the_row():
    async def run(client, row):
        message, answer = await client.chat("2+?", tools=[ADD])
        (call,) = message["tool_calls"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert (message["content"], json.loads(call["function"]["arguments"])) == ("I add.", {"first": 2})
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        last, answer = await client.chat("2+?", message, result, tools=[ADD])
        assert answer["choices"][0]["finish_reason"] == "stop"
        return float(last["content"] == "3")

    rows, _ = run_one(run, lambda context, index: "3" if "tool_response" in context else f"I add.\n{CALL}")
    assert texts(rows, "action_mask") == [f"I add.\n{CALL}{END}3{END}"]
    assert rows.dense("reward").tolist() == [1.0]


@pytest.mark.feature(154)
def test_call_is_text_for_an_agent_without_tools():
    async def run(client, row):
        message, answer = await client.chat("2+?")
        hidden, _ = await client.chat("2+?", "now?", tools=[ADD], tool_choice="none")
        assert message == hidden == {"role": "assistant", "content": f"I add.\n{CALL}", "refusal": None}
        return float(answer["choices"][0]["finish_reason"] == "stop")

    assert run_one(run, lambda *_: f"I add.\n{CALL}")[0].dense("reward").sum() == 1.0


def test_open_request_of_an_ended_agent_leaves_no_row():
    async def run(client, row):
        await client.chat("one")
        left = asyncio.create_task(client.post("chat/completions", {"model": "policy", "messages": [user("long")]}))
        while len(rolled.engine.seeds) < 2:
            await asyncio.sleep(0.01)
        left.cancel()
        return 1.0

    with acting(lambda context, index: "x" * 90 if "long" in context else "yes", run) as rolled:
        advance = rolled.engine.advance
        rolled.engine.advance = lambda: [] if len(rolled.engine.seeds) == 2 else advance()
        rows = rolled.fetch(groups({}))
        assert (texts(rows, "action_mask"), rolled.engine.running) == ([f"yes{END}"], 0)


@pytest.mark.feature(153)
@pytest.mark.parametrize("change", ["trimmed", "edited", "other tools", "two continuations"])
def test_request_that_changes_the_past_starts_a_row(change):
    async def run(client, row):
        first, _ = await client.chat("one", "or two")
        if change == "trimmed":
            await client.chat("or two", first, "more")
        elif change == "edited":
            await client.chat("one", "or two", {**first, "content": first["content"] + "!"}, "more")
        elif change == "other tools":
            await client.chat("one", "or two", first, "more", tools=[ADD])
        else:
            await asyncio.gather(*(client.chat("one", "or two", first, each) for each in ("more", "less")))
        return 1.0

    rows, _ = run_one(run)
    assert rows.dense("trajectory").tolist() == [rows.dense("trajectory")[0]] * 2
    assert [text.count(END) for text in texts(rows, "action_mask")] == ([2, 1] if change[0] == "t" and " " in change
                                                                        else [1, 1])  # fmt: skip
    assert sorted(rows.dense("reward").tolist()) == [0.0, 1.0]


@pytest.mark.feature(153)
def test_refused_continuation_leaves_its_row_to_a_shorter_one():
    async def run(client, row):
        first, _ = await client.chat("one")
        messages = [user("one"), first, user("x" * 5000)]
        refused = await client.post("chat/completions", {"model": "policy", "messages": messages})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        await client.chat("one", first, "two")
        return 1.0

    rows, _ = run_one(run)
    assert [text.count(END) for text in texts(rows, "action_mask")] == [2]


@pytest.mark.feature(152)
def test_repeated_request_returns_the_recorded_action():
    async def run(client, row):
        first, answer = await client.chat("one")
        again, repeated = await client.chat("one", stream=False, logprobs=True, temperature=0.3)
        assert (again, repeated["id"], repeated["usage"]) == (first, answer["id"], answer["usage"])
        both = await asyncio.gather(*(client.chat("two") for _ in range(4)))
        assert len({answer["id"] for _, answer in both}) == 1
        return 1.0

    rows, rolled = run_one(run)
    assert (len(rows), rows.dense("turns").tolist()) == (2, [2, 2])
    assert len(rolled.engine.seeds) == 2


@pytest.mark.feature(154)
def test_choices_are_rows_and_each_can_be_continued():
    seen = iter("abcdef")

    async def run(client, row):
        _, answer = await client.chat("one", n=3)
        chosen = answer["choices"][1]["message"]
        assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
        await client.chat("one", chosen, "two")
        return 1.0

    rows, _ = run_one(run, lambda *_: next(seen))
    assert sorted(text.count(END) for text in texts(rows, "action_mask")) == [1, 1, 2]
    assert rows.dense("reward").sum() == 1.0


@pytest.mark.feature(154)
@pytest.mark.parametrize("adds_stop", [True, False])
def test_text_continues_behind_the_stop_string_of_its_tokens(adds_stop):
    async def run(client, row):
        first = (await client.text("ask: ", stop="</s>"))["choices"][0]
        assert (first["text"], first["finish_reason"]) == ("q", "stop")
        await client.text(f"ask: {first['text']}{'</s>' if adds_stop else ''}found. ", stop="</s>")
        return 1.0

    def say(context, index):
        return "done" if "found" in context else "q</s>"

    with acting(say, run) as rolled:
        complete = rolled.engine._completion
        rolled.engine._completion = lambda request, why: complete(request, "stop" if "</s>" in rolled.engine.tokenizer
                                                                  .decode(request.done) else why)  # fmt: skip
        rows = rolled.fetch(groups({}))
    (whole,) = whole_texts(rows, rolled.engine.tokenizer)
    assert whole == f"ask: q</s>{END}found. done{END}"


def test_seeds_depend_on_content_and_not_on_order():
    def agent(order):
        async def run(client, row):
            for each in order:
                await client.chat(each)
            return 1.0

        return run

    seeds = [run_one(agent(order))[1].engine.seeds for order in (("one", "two2"), ("two2", "one"))]
    assert seeds[0] == seeds[1] and len(seeds[0]) == 2


def test_agent_without_request_or_with_error_fails_its_sample():
    async def run(client, row):
        if row["case"] == "raises":
            await client.chat("one")
            raise ValueError("of the agent")
        return float("nan") if row["case"] == "nan" else 1.0

    rows, _ = run_one(run, infos=[{"case": case} for case in ("silent", "raises", "nan")])
    faults = rows.objects("error")
    assert "made no request" in faults[0] and "ValueError: of the agent" in faults[1] and "nan" in faults[2]
    assert [text.count(END) for text in texts(rows, "action_mask")] == [0, 1, 0]


@pytest.mark.feature(157)
@pytest.mark.parametrize("on_loss", ["replay", "redraw"])
def test_lost_agent_gets_recorded_actions_or_others(on_loss):
    seen, losses, counter = [], iter([1, 1]), iter(range(100))

    async def run(client, row):
        first, _ = await client.chat("one")
        seen.append(first["content"])
        second, _ = await client.chat("one", first, "two")
        if next(losses, None):
            raise EnvironmentLost("the environment's process ended: killed by SIGKILL")
        return 1.0

    rows, rolled = run_one(run, lambda *_: f"action {next(counter)}", on_loss=on_loss)
    assert (rows.objects("error"), len(seen)) == ([None], 3)
    assert len(set(seen)) == (1 if on_loss == "replay" else 3)
    assert rows.dense("turns").tolist() == [2]
    assert texts(rows, "action_mask")[0].startswith(f"{seen[-1]}{END}")
    assert len({seed for seed in rolled.engine.seeds.values()}) == (1 if on_loss == "replay" else 3)


@pytest.mark.feature(157)
def test_abandoned_try_leaves_neither_requests_nor_its_key():
    lost, left = [], []

    async def run(client, row):
        ask = {"model": "policy", "messages": [user("long")]}
        if not lost:
            lost.append(client)
            await client.chat("one")
            left.append(asyncio.create_task(client.post("chat/completions", ask)))
            while len(rolled.engine.seeds) < 2:
                await asyncio.sleep(0.01)
            raise EnvironmentLost("its process ended")
        await asyncio.gather(*left, return_exceptions=True)
        assert (await client.post("chat/completions", ask, lost[0].key, lost[0].url)).status_code == 401
        await client.chat("long")
        return 1.0

    with acting(lambda context, _: "x" * 90 if "long" in context else "yes", run, on_loss="redraw") as rolled:
        rows = rolled.fetch(groups({}))
    assert (rows.dense("turns").tolist(), texts(rows, "action_mask")) == ([1], [f"{'x' * 90}{END}"])


@pytest.mark.feature(157)
def test_all_tries_of_an_agent_share_its_time():
    tries = []

    async def run(client, row):
        tries.append(client)
        if len(tries) == 1:
            await asyncio.sleep(1.5)
            raise EnvironmentLost("its process ended")
        await asyncio.sleep(30.0)

    rows, _ = run_one(run, timeout_s=2.0)
    (fault,) = rows.objects("error")
    assert fault.startswith("step gave no answer within 0.") and len(tries) == 2


@pytest.mark.feature(157)
@pytest.mark.parametrize(("kills", "error"), [(2, False), (3, True)])
def test_killed_process_of_agents_is_replaced_and_continues(tmp_path, kills, error):
    info, counter = {"starts": str(tmp_path / "starts"), "kills": kills}, iter(range(100))
    environment = IsolatedEnvironment("tests.support.killed_agent")
    with acting(lambda *_: f"action {next(counter)}", None, environment=environment) as rolled:
        rows = rolled.fetch(groups(info))
    assert (tmp_path / "starts").read_text() == "action 0\n" * 3
    (fault,) = rows.objects("error")
    assert bool(fault) == error and (fault is None or "killed by SIGKILL" in fault)
    assert texts(rows, "action_mask") == [f"action 0{END}" + ("" if error else f"action 1{END}")]


@pytest.mark.feature(157)
@pytest.mark.parametrize("stamps", [[WeightStamp(0, "aa")], [WeightStamp(0, "bb")]], ids=["same weights", "others"])
def test_lost_worker_leaves_actions_to_its_replacement(tmp_path, stamps):
    counter = iter(range(100))

    async def run(client, row):
        first, _ = await client.chat("one")
        second, _ = await client.chat("one", first, "two")
        await client.chat("one", first, "two", second, "three")
        return 1.0

    def member(stamp):
        copies = KeptSamples(tmp_path, 0)
        copies.note(stamp)
        return acting(lambda *_: f"action {next(counter)}", run, copies=copies), copies

    losing, copies = member(WeightStamp(0, "aa"))
    with losing as rolled:
        advance = rolled.engine.advance

        def lose_third():
            if len(rolled.engine.seeds) == 3:
                raise EngineError("the engine is lost")
            return advance()

        rolled.engine.advance = lose_third
        with pytest.raises(EngineError, match="is lost"):
            rolled.fetch(groups({}))
        copies._writer.shutdown(wait=True)
    replacing, _ = member(stamps[0])
    with replacing as rolled:
        rows = rolled.fetch(groups({}))
    numbers = (0, 1, 3) if stamps[0].fingerprint == "aa" else (3, 4, 5)
    assert texts(rows, "action_mask") == ["".join(f"action {number}{END}" for number in numbers)]


@pytest.mark.feature(157)
def test_kept_action_needs_its_context_and_survives_torn_lines(tmp_path):
    group, one = Group(0, 1, seed=(1, 2)), np.ones(1, np.int64)
    copies = KeptSamples(tmp_path, 0)
    copies.note(WeightStamp(0, "aa"))
    request = replace(Request.fresh(0, 0, [1, 2]), done=one, logprobs=one.astype(np.float32), versions=one - 1)
    file = copies._file(group.key, 0).with_suffix(".actions")
    for mark in ("first", "second", "third"):
        copies.save_action(group, 0, mark, Completion(request, "eos", mark))
        copies._writer.submit(lambda: file.write_text(file.read_text() + '\n{"torn'))
    copies._writer.shutdown(wait=True)
    actions = KeptSamples(tmp_path, 0).load_actions(group, 0)
    assert [*actions] == ["first", "second", "third"]
    assert completed(Request.fresh(0, 0, [1, 2]), actions["second"]).text == "second"
    assert completed(Request.fresh(0, 0, [1, 3]), actions["second"]) is None


@pytest.mark.feature(157)
def test_agent_that_is_always_lost_fails_its_sample():
    async def run(client, row):
        await client.chat("one")
        raise EnvironmentLost("its process ended")

    rows, _ = run_one(run)
    assert rows.objects("error") == ["its process ended"]


@pytest.mark.feature(152, 153)
@pytest.mark.slow
def test_trained_tokens_are_the_sampled_ones_in_200_episodes():
    """Histories are trimmed, requests repeated and sent side by side; the engine remembers all it has sampled."""
    sampled = {}

    def say(context, index):
        return f"{random.Random(f'{context}{index}').getrandbits(64):x}"

    async def run(client, row):
        dice, history = random.Random(row["seed"]), [user("begin")]
        for turn in range(dice.randint(1, 6)):
            message, answer = await client.chat(*history, return_token_ids=True, n=dice.choice([1, 1, 2]))
            for choice in answer["choices"]:
                sampled.setdefault(row["seed"], {})[(*answer["prompt_token_ids"], *choice["token_ids"])] = len(
                    answer["prompt_token_ids"]
                )
            if dice.random() < 0.3:
                assert (await client.chat(*history, n=len(answer["choices"])))[0] == message
            history += [message, user(f"{turn}" * dice.randint(1, 30))]
            if dice.random() < 0.3:
                history = history[dice.randint(0, len(history) - 2) :]
                history = history if history[0]["role"] == "user" else history[1:]
        return 1.0

    rows, _ = run_one(run, say, infos=[{"seed": seed} for seed in range(200)], max_turns=100)
    trained = {}
    for tokens, mask, info in zip(
        rows.ragged("tokens"), rows.ragged("action_mask"), rows.objects("extra_info"), strict=True
    ):
        tokens, mask = tokens.tolist(), [*mask.tolist(), False]
        ends = [at + 1 for at in range(len(tokens)) if mask[at] and not mask[at + 1]]
        for end in ends:
            start = end - 1 - mask[:end][::-1].index(False) + 1
            trained.setdefault(info["seed"], {})[tuple(tokens[:end])] = start
    assert trained == sampled
    assert sum(map(len, sampled.values())) > 600
