# SPDX-License-Identifier: Apache-2.0
"""Several reward functions as one."""

import asyncio
import re
import threading
import time
from functools import partial

import numpy as np
import pytest

from dlrover.python.rl.common.by_value import name_for, readable_name
from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.core.functions import count_abandoned
from dlrover.python.rl.environment.core.scoring import Completed, Reward, RewardFunction, WeightedRewards
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier, VerifierPool
from tests.support import verifiers


def length(completion, answer, extra_info):
    return len(completion)


async def soon(completion, answer, extra_info):
    await asyncio.sleep(0.2)
    return extra_info.get("soon", 1)


def slowly(completion, answer, extra_info):
    time.sleep(0.2)
    return 1.0


FUNCTIONS = {"length": length, "soon": soon}


@pytest.mark.parametrize("way", ["now", "score"])
def test_the_weighted_sum_of_sync_and_async_functions(way):
    rewards = WeightedRewards(FUNCTIONS, {"length": 0.5, "soon": -2.0})
    sample = Completed("four", None, {"soon": 3})
    found = asyncio.run(rewards.score(sample)) if way == "score" else rewards.now([sample])[0]
    assert found == Reward(0.5 * 4 - 2.0 * 3, {"length": 4.0, "soon": 3.0})


def test_functions_wait_side_by_side():
    functions = {f"{name}{at}": function for name, function in (("a", soon), ("b", slowly)) for at in range(3)}
    rewards = WeightedRewards(functions, dict.fromkeys(functions, 1.0))

    async def many():
        return await asyncio.gather(*(rewards.score(Completed("x")) for _ in range(1)))

    began = time.monotonic()
    (found,) = asyncio.run(many())
    assert found.total == 6.0
    assert time.monotonic() - began < 1.0


def test_functions_that_are_given_up_take_no_others_place_and_are_counted():
    stop, before = threading.Event(), count_abandoned()
    hanging = WeightedRewards({"hangs": lambda *_: float(stop.wait(60))}, {"hangs": 1.0})
    fine = WeightedRewards({"length": length}, {"length": 1.0})

    async def many():
        gone = await asyncio.gather(
            *(asyncio.wait_for(hanging.score(Completed("x")), 0.2) for _ in range(50)), return_exceptions=True
        )
        async with asyncio.timeout(20):
            return gone, count_abandoned() - before, await fine.score(Completed("four"))

    try:
        gone, abandoned, found = asyncio.run(many())
    finally:
        stop.set()
    assert all(isinstance(error, TimeoutError) for error in gone)
    assert (abandoned, found.total) == (50, 4.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_part_that_is_no_reward_leaves_none(bad):
    rewards = WeightedRewards(FUNCTIONS, {"length": 1.0, "soon": 0.0})
    with pytest.raises(VerifierError, match="which is not a reward: soon"):
        rewards.now([Completed("x", None, {"soon": bad})])


def test_a_text_is_no_reward_and_a_function_of_a_script_has_its_own_name(tmp_path):
    name = name_for(lambda completion: "0.5", tmp_path)
    with pytest.raises(VerifierError, match=r"^returned the text '0.5', which is not a reward$"):
        WeightedRewards.load({name: 1.0}).now([Completed("x")])
    with pytest.raises(VerifierError, match=r"^returned the text '0.5', which is not a reward: lambda$"):
        WeightedRewards.load({name: 1.0, f"{__name__}:later_in_batches": 1.0}).now([Completed("x")])
    assert readable_name("some.module:function") == "some.module:function"


def test_a_column_that_a_function_asks_for_is_missed_beforehand():
    def graded(completion, grade): ...
    def in_batch(completions, prompts, grade, **others): ...
    def at_will(completion, grade=1): ...

    def whole(completions, prompt): ...
    def first(completion, /, grade): ...

    functions = [RewardFunction(function) for function in (graded, in_batch, first, at_will, by_position)]
    assert [function.find_missing({"grade"}) for function in functions] == [""] * 5
    found = [function.find_missing({"grad"}) for function in functions]
    assert ["did you mean 'grad'" in what for what in found[:3]] == [True] * 3
    assert found[3:] == [""] * 2
    assert "did you mean 'prompts'" in RewardFunction(whole).find_missing({"grade"})
    assert RewardFunction(lambda completion, /, grade: grade).on(Completed("x", None, {"grade": 2.0})) == 2.0


TALK = [{"role": "user", "content": "6 x 7?"}]
SAMPLE = Completed("42", "42", {"difficulty": 3}, "6 x 7?")


def by_position(text, gold, info):
    return text, gold, info


def by_one(text):
    return text


def by_name(completion, answer):
    return completion, answer


def by_column(text, difficulty, unknown=5):
    return text, difficulty, unknown


def by_keyword(*, prompt, completion, extra_info):
    return prompt, completion, extra_info


def verls(data_source, solution_str, ground_truth, extra_info=None):
    return data_source, solution_str, ground_truth, extra_info


def verls_gsm8k(solution_str, ground_truth, method="strict", score=1.0):
    return solution_str, ground_truth, method, score


def by_the_rest(text, **columns):
    return text, columns["difficulty"], columns["answer"], columns["prompt"]


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (by_position, ("42", "42", {"difficulty": 3})),
        (by_one, "42"),
        (by_name, ("42", "42")),
        (by_column, ("42", 3, 5)),
        (by_keyword, ("6 x 7?", "42", {"difficulty": 3})),
        (by_the_rest, ("42", 3, "42", "6 x 7?")),
        (lambda *fields: fields, ("42", "42", {"difficulty": 3})),
    ],
)
def test_a_function_is_called_by_its_signature(function, given):
    RewardFunction(function).check("mine")
    assert RewardFunction(function).on(SAMPLE) == given


def test_verls_functions_are_called_by_verls_names():
    row = {"data_source": "gsm8k", "solution_str": "40"}
    sample = Completed("42", "43", row, "6 x 7?")
    assert RewardFunction(verls).on(sample) == ("gsm8k", "42", "43", row)
    assert RewardFunction(verls_gsm8k).on(sample) == ("42", "43", "strict", 1.0)
    assert RewardFunction(verls).find_missing(row) == RewardFunction(verls_gsm8k).find_missing({}) == ""
    assert "'data_source', which is not a column of its row" in RewardFunction(verls).find_missing({"level"})


def by_level(completion, answer, level=1):
    return answer, level


@pytest.mark.parametrize("function", [by_level, lambda text, answer, level=1: (answer, level)])
def test_a_column_that_is_null_in_a_row_has_its_default_there(function):
    scored = RewardFunction(function, ["level", "source"])
    for row, level in ({"level": 3}, 3), ({"source": "x"}, 1), ({}, 1):
        assert scored.on(SAMPLE._replace(extra_info=row)) == ("42", level)
    assert scored.find_missing(["source"]) == ""
    assert RewardFunction(function, ["source"]).on(SAMPLE) == ("42", SAMPLE.extra_info)


def test_a_verifiers_process_knows_the_columns_of_all_rows():
    with DeadlineVerifier("tests.support.verifiers:level", timeout_s=20, columns={"level"}) as verifier:
        assert [verifier("x", None, row) for row in ({"level": 3}, {})] == [3.0, 1.0]


def by_other_names(response, difficulty):
    return response, difficulty


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (by_keyword, ("6 x 7?", "42", {**SAMPLE.extra_info, "prompt": "?", "completion": "41", "response": "40"})),
        (by_other_names, ("42", 3)),
    ],
)
def test_a_column_of_the_row_does_not_take_the_samples_place(function, given):
    row = {**SAMPLE.extra_info, "prompt": "?", "completion": "41", "response": "40"}
    assert RewardFunction(function).on(SAMPLE._replace(extra_info=row)) == given


def test_what_a_function_asks_for_and_its_row_lacks_is_named():
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


def test_trls_functions_are_given_all_samples_at_once():
    rewards = WeightedRewards({"a": in_batches, "b": later_in_batches}, {"a": 1.0, "b": 2.0})
    assert rewards.compares
    samples = [SAMPLE, SAMPLE._replace(completion="41", extra_info={"difficulty": 4}), SAMPLE]
    assert [reward.total for reward in rewards.now(samples)] == [2.0 + 2.0, 2.0, 2.0 + 2.0]
    assert asyncio.run(rewards.score(SAMPLE)) == Reward(3.0, {"a": 1.0, "b": 1.0})
    with pytest.raises(VerifierError, match="returned 1 rewards for 2 completions$"):
        WeightedRewards({"short": lambda completions: [1.0]}, {"short": 1.0}).now([SAMPLE, SAMPLE])


async def later_as_one(completions):
    return 1.0


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda completions: 0.5, "0.5"),
        (lambda completions: None, "None"),
        (lambda completions: "0.5", "'0.5'"),
        (lambda completions: {"a": 1.0, "b": 2.0}, "{'a': 1.0, 'b': 2.0}"),
        (lambda completions: np.array(0.5), "array(0.5)"),
        (later_as_one, "1.0"),
    ],
)
def test_trls_functions_are_told_what_to_return(function, shown):
    what = f"returned {shown}, not a list of 2: a function of 'completions' must return a number for each"
    with pytest.raises(VerifierError, match=f"^{re.escape(what)}: one$"):
        WeightedRewards({"one": function, "a": in_batches}, {"one": 1.0, "a": 1.0}).now([SAMPLE, SAMPLE])


@pytest.mark.parametrize(("prompt", "shown"), [("6 x 7?", "42"), (TALK, [{"role": "assistant", "content": "42"}])])
def test_trls_functions_see_messages_where_prompts_are(prompt, shown):
    def judge(prompts, completions):
        assert (prompts, completions) == ([prompt], [shown])
        return [1.0]

    assert RewardFunction(judge).on_all([SAMPLE._replace(prompt=prompt)]) == [1.0]


@pytest.mark.parametrize("weights", [{}, {"length": 1.0}, {"length": 1.0, "soon": float("nan")}])
def test_every_function_needs_a_finite_weight(weights):
    with pytest.raises(ValueError, match="weight"):
        WeightedRewards(FUNCTIONS, weights)


def test_they_run_in_a_verifiers_process_by_name():
    weights = {"tests.support.verifiers:length": 0.25, "tests.support.verifiers:awaited": 2.0}
    with DeadlineVerifier(weights, timeout_s=20) as verifier:
        assert verifier.score_all([Completed("four", None, {"bonus": 4})]) == [
            Reward(0.25 * 8 + 2.0 * 5, {"tests.support.verifiers:length": 8.0, "tests.support.verifiers:awaited": 5.0})
        ]
        assert verifier("four", None) == 1.0 + 10.0
    with pytest.raises(
        VerifierError, match="tests.support.verifiers:length \\+ tests.support.verifiers:lenth could not be loaded"
    ):
        DeadlineVerifier({verifiers.length: 1.0, "tests.support.verifiers:lenth": 1.0}, timeout_s=20)


def test_a_verifiers_process_is_asked_once_for_a_batch():
    pool = VerifierPool(2, partial(DeadlineVerifier, "tests.support.verifiers:place_in_batch", timeout_s=20))
    try:
        assert [reward.total for reward in pool.score(Completed(text) for text in "abc")] == [0.0, 1.0, 2.0]
        for error in pool.score([Completed("a"), Completed("raise")]):
            assert str(error).startswith("tests.support.verifiers:place_in_batch raised ValueError: not this")
        for error in pool.score([Completed("one")]):
            assert str(error).startswith(
                "tests.support.verifiers:place_in_batch returned 1.0, not a list of 1: a function"
            )
        assert pool.score([]) == []
    finally:
        pool.close()
