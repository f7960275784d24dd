# SPDX-License-Identifier: Apache-2.0
"""Environments found by name."""

import asyncio
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.environment.core.base import (
    MAX_STATE_LENGTH,
    EnvironmentTraits,
    StepResult,
    validate_state,
    validate_step,
)
from dlrover.python.rl.environment.core.functions import (
    call_async,
    find_environment,
    load_environment,
    run_in_thread,
)
from tests.support import user_environments

SCRIPT = Path(user_environments.__file__)
README = """
async def step(state, action, extra_info):
    env_response = {
        "next_state": None,
        "reward": 0.0,
        "score": 0.0,
        "done": False,
        "extra_info": extra_info
    }
    if action.startswith("search "):
        passage = " (found: Beijing) "
        env_response["next_state"] = state + action + passage
    elif action.startswith("answer "):
        pred = action.removeprefix("answer ")
        reward = float(pred == extra_info["answer"])
        env_response["reward"] = reward
        env_response["score"] = 2 * reward
        env_response["done"] = True
    return env_response
"""


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.mark.feature(86)
def test_the_readmes_environment_made_runnable_loads_from_a_path(tmp_path):
    path = tmp_path / "search.py"
    path.write_text(README)
    environment = load_environment(str(path))
    info = {"answer": "Beijing", "list": [1, (2, 3)]}
    assert run(environment.reset(info)) is None
    found = run(environment.step("Q? ", "search China", info))
    assert found == StepResult("Q? search China (found: Beijing) ", 0.0, 0.0, False, info)
    assert found.extra_info is info
    right = run(environment.step(found.next_state, "answer Beijing", info))
    assert (right.reward, right.score, right.done, right.next_state) == (1.0, 2.0, True, None)
    assert run(environment.step("Q? ", "hm", info)) == StepResult(None, 0.0, 0.0, True, info)


@pytest.mark.feature(86)
@pytest.mark.parametrize("where", [str(SCRIPT), "tests.support.user_environments"])
def test_a_script_or_a_module_with_reset_and_close(where):
    environment = load_environment(where)
    info = {"first": "begin "}
    assert run(environment.reset(info)) == "begin "
    assert info["began"]
    result = run(environment.step("begin ", "go ", info))
    assert (result.next_state, result.reward, result.score) == ("begin go seen ", 1.0, 0.5)
    assert result.extra_info["turns"] == 1
    run(environment.close(info))
    run(environment.shutdown())


def test_a_class_with_options_and_sync_calls():
    environment = load_environment(f"{SCRIPT}:Counting", {"start": 3})
    assert environment.traits == EnvironmentTraits(episodes=2)
    assert run(environment.reset({})) == "3"
    assert run(environment.step("3", "4", {"k": 1})) == StepResult("7", 7.0, 7.0, False, {"k": 1})
    assert run(environment.step("3", "8", {})).done
    run(environment.close({}))


@pytest.mark.parametrize(
    ("where", "options", "what"),
    [
        ("/nowhere/env.py", None, "no such file: /nowhere/env.py"),
        (str(SCRIPT.with_name("user_environment.py")), None, "did you mean 'user_environments.py'"),
        ("tests.support.user_environmnts", None, "did you mean 'tests.support.user_environments'"),
        ("tests.support.user_environments:Countin", None, "has no 'Countin'; did you mean 'Counting'"),
        (
            "tests.support.user_environments:Counting",
            {"strt": 1},
            "an unexpected keyword argument 'strt'; did you mean 'start'",
        ),
        ("tests.support.user_environments:Without", None, "has no function 'step'; did you mean 'stpe'"),
        (
            "tests.support.user_environments:TooFew",
            None,
            "step is called with (state, action, extra_info): too many positional arg",
        ),
        (
            "tests.support.user_environments:TooMany",
            None,
            "reset is called with (extra_info): missing a required argument",
        ),
        ("tests.support.user_environments", {"a": 1}, "take no options: a"),
    ],
)
def test_what_is_not_there_is_named(where, options, what):
    for load in (find_environment, load_environment):
        with pytest.raises(EnvironmentFailed) as caught:
            load(where, options)
        assert what in str(caught.value)


def test_a_script_that_raises_names_itself(tmp_path):
    (tmp_path / "bad.py").write_text("import sys\nsys.exit(3)\n")
    for _ in range(2):
        with pytest.raises(EnvironmentFailed, match=r"bad.py cannot be loaded: SystemExit: 3"):
            load_environment(str(tmp_path / "bad.py"))


def test_a_script_may_import_its_neighbour(tmp_path):
    (tmp_path / "some_neighbour_of_it.py").write_text("answer = 42\n")
    (tmp_path / "it.py").write_text("from some_neighbour_of_it import answer\ndef step(s, a, e):\n    return answer\n")
    with pytest.raises(EnvironmentFailed, match="step returned int"):
        run(load_environment(str(tmp_path / "it.py")).step("", "", {}))


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (None, "step returned None, not a StepResult or a dict of its fields"),
        ({"reward": 1, "done": True, "dne": 1}, "unknown field 'dne'; did you mean 'done'"),
        ({"next_state": "x"}, "step returned None as 'reward'"),
        ({"next_state": "x", "reward": "much"}, "step returned str as 'reward'"),
        ({"next_state": "x", "reward": 1, "score": float("inf")}, "step returned inf as 'score'"),
        ({"next_state": "x", "reward": 1, "done": "no"}, "step returned str as 'done', not True or False: no"),
        ({"next_state": "x", "reward": 1, "done": 1}, "step returned int as 'done', not True or False: 1"),
        ({"next_state": "x", "reward": 1, "done": np.ones(2) > 0}, "step returned numpy.ndarray as 'done'"),
        ({"next_state": "x", "reward": np.ones(2)}, "step returned numpy.ndarray as 'reward', not a number"),
        ({"next_state": 3, "reward": 1}, "next_state is int, not text"),
        ({"next_state": "x" * (MAX_STATE_LENGTH + 1), "reward": 1}, "characters, 4000000 at most"),
        ({"next_state": "x", "reward": 1, "extra_info": None}, "step returned None as 'extra_info'"),
        (StepResult(None, 0.0, 0.0, False), "no 'next_state', and is not done"),
        (StepResult("x", float("nan"), 0.0, False), "step returned nan as 'reward'"),
    ],
)
def test_results_that_are_none(returned, what):
    with pytest.raises(EnvironmentFailed) as caught:
        validate_step(returned, {})
    assert what in str(caught.value)


def test_a_sync_call_that_is_given_up_does_not_go_on_computing():
    ended = threading.Event()

    def compute():
        try:
            while True:
                pass
        finally:
            ended.set()

    async def give_up():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await run_in_thread(compute)
        assert await asyncio.to_thread(ended.wait, 20)

    asyncio.run(give_up())


def test_leaving_the_process_is_an_error_of_the_call():
    with pytest.raises(RuntimeError, match="SystemExit: no config"):
        asyncio.run(call_async(sys.exit, "no config"))


@pytest.mark.feature(89)
def test_the_score_is_the_reward_by_default_and_apart_from_it_where_given():
    assert validate_step({"reward": 1, "done": True}, {"k": 1}) == StepResult(None, 1.0, 1.0, True, {"k": 1})
    result = validate_step({"reward": 1, "score": 0, "next_state": "x", "extra_info": {}}, {"k": 1})
    assert (result.reward, result.score, result.extra_info) == (1.0, 0.0, {})


def test_the_module_is_the_one_that_tests_import():
    environment = load_environment("tests.support.user_environments")
    run(environment.close({"who": "me"}))
    assert {"who": "me"} in user_environments.log


@pytest.mark.feature(86)
@pytest.mark.parametrize("library", [np.asarray, torch.asarray])
def test_numbers_and_truth_values_of_arrays_are_as_good_as_pythons(library):
    found = library([0.0, 0.5])
    result = validate_step({"reward": found.max(), "score": found.sum(), "done": found.max() > 0}, {})
    assert result == StepResult(None, 0.5, 0.5, True, {})
    assert [type(value) for value in (result.reward, result.score, result.done)] == [float, float, bool]
    assert not validate_step(StepResult("x", found.max(), 0.0, found.max() > 1), {}).done


def test_half_a_character_in_a_state_is_replaced():
    calls = [{"function": {"name": "f\ud83d", "arguments": {"\udc00": ["x\ud83d", ("y\ud83d", 1)]}}}]
    message = {"role": "assistant", "content": "half \ud83d", "tool_calls": calls}
    whole = [{"function": {"name": "f\ufffd", "arguments": {"\ufffd": ["x\ufffd", ["y\ufffd", 1]]}}}]
    assert validate_state("it", "\ud83d\ud83d\U0001f600") == "\ufffd\ufffd\U0001f600"
    assert validate_state("it", [message]) == [{"role": "assistant", "content": "half \ufffd", "tool_calls": whole}]
