# SPDX-License-Identifier: Apache-2.0
"""Environments and reward functions by name, and their results."""

import asyncio
import sys
import threading
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.common import extensions
from dlrover.python.rl.common.errors import EnvironmentFailed, VerifierError
from dlrover.python.rl.environment.core import functions
from dlrover.python.rl.environment.core.base import EnvironmentTraits, StepResult, validate_state, validate_step
from dlrover.python.rl.environment.core.functions import find_environment, load_environment, load_function
from dlrover.python.rl.environment.core.tools import ToolEnvironment
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier
from dlrover.python.rl.environment.verifiers import exact
from tests.support import user_environments

SCRIPT = Path(user_environments.__file__)
MODULE = "tests.support.user_environments"


@pytest.mark.feature(86)
@pytest.mark.parametrize("where", [str(SCRIPT), MODULE])
async def test_environment_is_a_script_or_a_module(where):
    environment = load_environment(where)
    info = {"first": "begin "}
    assert await environment.reset(info) == "begin "
    assert info["began"]
    result = await environment.step("begin ", "go ", info)
    assert (result.next_state, result.reward, result.score) == ("begin go seen ", 1.0, 0.5)
    assert result.extra_info["turns"] == 1
    await environment.close(info)
    await environment.shutdown()


async def test_environment_is_a_class_with_options():
    environment = load_environment(f"{MODULE}:Counting", {"start": 3})
    assert environment.traits == EnvironmentTraits(episodes=2)
    assert await environment.reset({}) == "3"
    assert await environment.step("3", "4", {"k": 1}) == StepResult("7", 7.0, 7.0, False, {"k": 1})


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("/nowhere/env.py", None, "no such file: /nowhere/env.py"),
        (str(SCRIPT.with_name("user_environment.py")), None, "did you mean 'user_environments.py'"),
        ("tests.support.user_environmnts", None, "did you mean 'tests.support.user_environments'"),
        (f"{MODULE}:Countin", None, "has no 'Countin'; did you mean 'Counting'"),
        (f"{MODULE}:Counting", {"strt": 1}, "an unexpected keyword argument 'strt'; did you mean 'start'"),
        (f"{MODULE}:Without", None, "has no function 'step'; did you mean 'stpe'"),
        (f"{MODULE}:TooFew", None, "step is called with (state, action, extra_info): too many positional arg"),
        (f"{MODULE}:TooMany", None, "reset is called with (extra_info): missing a required argument"),
        (MODULE, {"a": 1}, "take no options: a"),
        ("tols", None, "did you mean 'tools'"),
    ],
)
def test_environment_failing_to_load_is_named(where, options, message):
    for load in (find_environment, load_environment):
        with pytest.raises(EnvironmentFailed) as caught:
            load(where, options)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "step returned None, not a StepResult or a dict of its fields"),
        ({"reward": 1, "done": True, "dne": 1}, "unknown field 'dne'; did you mean 'done'"),
        ({"next_state": "x"}, "step returned None as 'reward'"),
        ({"next_state": "x", "reward": "much"}, "step returned str as 'reward'"),
        ({"next_state": "x", "reward": 1, "score": float("inf")}, "step returned inf as 'score'"),
        ({"next_state": "x", "reward": 1, "done": "no"}, "step returned str as 'done', not True or False: no"),
        ({"next_state": "x", "reward": 1, "done": np.ones(2) > 0}, "step returned numpy.ndarray as 'done'"),
        ({"next_state": "x", "reward": np.ones(2)}, "step returned numpy.ndarray as 'reward', not a number"),
        ({"next_state": 3, "reward": 1}, "next_state is int, not text"),
        ({"next_state": "x" * 4_000_001, "reward": 1}, "characters, 4000000 at most"),
        ({"next_state": "x", "reward": 1, "extra_info": None}, "step returned None as 'extra_info'"),
        (StepResult(None, 0.0, 0.0, False), "no 'next_state', and is not done"),
    ],
)
def test_step_result_of_a_wrong_type_is_refused(returned, message):
    with pytest.raises(EnvironmentFailed) as caught:
        validate_step(returned, {})
    assert message in str(caught.value)


async def test_environment_script_may_import_and_fail(tmp_path):
    (tmp_path / "some_neighbour_of_it.py").write_text("answer = 42\n")
    (tmp_path / "it.py").write_text("from some_neighbour_of_it import answer\ndef step(s, a, e):\n    return answer\n")
    with pytest.raises(EnvironmentFailed, match="step returned int"):
        await load_environment(str(tmp_path / "it.py")).step("", "", {})
    (tmp_path / "bad.py").write_text("import sys\nsys.exit(3)\n")
    for _ in range(2):
        with pytest.raises(EnvironmentFailed, match=r"bad.py cannot be loaded: SystemExit: 3"):
            load_environment(str(tmp_path / "bad.py"))


async def test_sync_call_is_interrupted_when_cancelled():
    ended = threading.Event()

    def compute():
        try:
            while True:
                pass
        finally:
            ended.set()

    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await functions.run_in_thread(compute)
    assert await asyncio.to_thread(ended.wait, 20)
    with pytest.raises(RuntimeError, match="SystemExit: no config"):
        await functions.call_async(sys.exit, "no config")


@pytest.mark.feature(89)
def test_step_score_is_the_reward_by_default():
    assert validate_step({"reward": 1, "done": True}, {"k": 1}) == StepResult(None, 1.0, 1.0, True, {"k": 1})
    fields = {"reward": 1, "score": 0, "next_state": "x", "extra_info": {}}
    assert validate_step(fields, {"k": 1}) == StepResult("x", 1.0, 0.0, False, {})


@pytest.mark.feature(86)
@pytest.mark.parametrize("library", [np.asarray, torch.asarray])
def test_step_values_may_be_of_arrays(library):
    array = library([0.0, 0.5])
    result = validate_step({"reward": array.max(), "score": array.sum(), "done": array.max() > 0}, {})
    assert result == StepResult(None, 0.5, 0.5, True, {})
    assert [type(value) for value in (result.reward, result.score, result.done)] == [float, float, bool]
    assert not validate_step(StepResult("x", array.max(), 0.0, array.max() > 1), {}).done


def test_state_with_half_a_character_is_replaced():
    calls = [{"function": {"name": "f\ud83d", "arguments": {"\udc00": ["x\ud83d", ("y\ud83d", 1)]}}}]
    message = {"role": "assistant", "content": "half \ud83d", "tool_calls": calls}
    whole = [{"function": {"name": "f\ufffd", "arguments": {"\ufffd": ["x\ufffd", ["y\ufffd", 1]]}}}]
    assert validate_state("it", "\ud83d\ud83d\U0001f600") == "\ufffd\ufffd\U0001f600"
    assert validate_state("it", [message]) == [{"role": "assistant", "content": "half \ufffd", "tool_calls": whole}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dlrover.python.rl.environment.verifiers:exct", "no 'exct'; did you mean 'exact'"),
        ("dlrover.python.rl.environment.core.functions:__name__", "is str, not a function"),
        ("json", "no reward function is called 'json'"),
        ("exct", "did you mean 'exact'"),
        ("needs_another:f", "no module named 'qqq_absent_zzz'$"),
    ],
)
def test_unknown_function_is_answered_with_the_nearest_name(name, message, tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import qqq_absent_zzz\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(VerifierError, match=message):
        load_function(name)


def test_verifier_process_searches_the_folders_of_its_parent(tmp_path, monkeypatch):
    (tmp_path / "beside_the_job.py").write_text("def reward(completion, answer, extra_info):\n    return 0.25\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with DeadlineVerifier("beside_the_job:reward", timeout_s=10) as verifier:
        assert verifier("", None) == 0.25


def test_environment_has_a_name_or_an_entry_point(tmp_path, monkeypatch):
    (tmp_path / "installed_world.py").write_text("async def step(state, action, extra_info):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("world", "installed_world", functions.ENVIRONMENTS.group)
    monkeypatch.setattr(extensions, "entry_points", lambda group: [point] if group == point.group else [])
    assert find_environment("world").__name__ == "installed_world"
    assert find_environment("tools", {"tools": {}, "judge": ""}) is ToolEnvironment
    assert load_function("dlrover.python.rl.environment.verifiers:exact") is load_function("exact") is exact
