# SPDX-License-Identifier: Apache-2.0
"""Reward functions by name."""

from importlib.metadata import EntryPoint

import pytest

from dlrover.python.rl.common import extensions
from dlrover.python.rl.common.errors import EnvironmentFailed, VerifierError
from dlrover.python.rl.environment.core.functions import ENVIRONMENTS, find_environment, load_function
from dlrover.python.rl.environment.core.tools import ToolEnvironment
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier
from dlrover.python.rl.environment.verifiers import exact


def test_a_function_is_found_by_its_name():
    assert load_function("dlrover.python.rl.environment.verifiers:exact") is load_function("exact") is exact


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("dlrover.python.rl.environment.verifiers:exct", "no 'exct'; did you mean 'exact'"),
        ("dlrover.python.rl.environment.verifyers:exact", "did you mean 'dlrover.python.rl.environment.verifiers'"),
        ("dlrover.python.rl.enviroment.verifiers:exact", "did you mean 'dlrover.python.rl.environment'"),
        ("dlrove:exact", "no module named 'dlrove'; did you mean 'dlrover'"),
        ("json:loads.x", "no 'loads.x'"),
        ("dlrover.python.rl.environment.core.functions:__name__", "is str, not a function"),
        ("json", "no reward function is called 'json'"),
        ("exct", "did you mean 'exact'"),
        ("needs_another:f", "no module named 'qqq_absent_zzz'$"),
        ("raises_at_once:f", "cannot be imported: RuntimeError: oh"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_the_nearest_name(name, what, tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import qqq_absent_zzz\n")
    (tmp_path / "raises_at_once.py").write_text("raise RuntimeError('oh')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(VerifierError, match=what):
        load_function(name)


def test_the_child_finds_what_the_parent_finds(tmp_path, monkeypatch):
    """A folder that only this process searches, as the job file's is."""
    (tmp_path / "beside_the_job.py").write_text("def reward(completion, answer, extra_info):\n    return 0.25\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with DeadlineVerifier("beside_the_job:reward", timeout_s=10) as verifier:
        assert verifier("", None) == 0.25


def test_an_environment_has_a_registered_name_or_an_entry_point(tmp_path, monkeypatch):
    (tmp_path / "installed_world.py").write_text("async def step(state, action, extra_info):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("world", "installed_world", ENVIRONMENTS.group)
    monkeypatch.setattr(extensions, "entry_points", lambda group: [point] if group == point.group else [])
    assert find_environment("world").__name__ == "installed_world"
    assert find_environment("tools", {"tools": {}, "judge": ""}) is ToolEnvironment
    with pytest.raises(EnvironmentFailed, match="did you mean 'tools'"):
        find_environment("tols")


def test_the_verifiers_of_the_common_data_sets_have_their_names():
    pytest.importorskip("math_verify")
    for name, said in (("gsm8k", "so it is #### 1,072"), ("math", "so it is \\boxed{1072}")):
        judge = load_function(f"dlrover.python.rl.environment.verifiers:{name}")
        assert (judge(said, "1072", {}), judge(said, "1073", {})) == (1.0, 0.0)
