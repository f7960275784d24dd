"""Reward functions by name."""

import pytest

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.deadline import DeadlineVerifier
from dlrover.python.rl.environment.lookup import load_function
from dlrover.python.rl.environment.verifiers import exact


def test_a_function_is_found_by_its_name():
    assert load_function("dlrover.python.rl.environment.verifiers:exact") is exact


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("dlrover.python.rl.environment.verifiers:exct", "no function 'exct'; did you mean 'exact'"),
        ("dlrover.python.rl.environment.verifyers:exact", "did you mean 'dlrover.python.rl.environment.verifiers'"),
        ("dlrover.python.rl.enviroment.verifiers:exact", "did you mean 'dlrover.python.rl.environment'"),
        ("dlrove:exact", "no module named 'dlrove'; did you mean 'dlrover'"),
        ("json:loads.x", "no function 'loads.x'"),
        ("dlrover.python.rl.environment.lookup:__name__", "is str, not a function"),
        ("json", "not of the form"),
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
