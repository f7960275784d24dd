# SPDX-License-Identifier: Apache-2.0
"""Verifiers under a deadline."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import VerifierCrashed, VerifierError, VerifierTimeout
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier
from tests.support import verifiers


@pytest.fixture(scope="module")
def obedient():
    with DeadlineVerifier("tests.support.verifiers:obedient", timeout_s=10) as verifier:
        yield verifier


def is_alive(pid: int) -> bool:
    """True while the process runs; a zombie that its new parent has yet to reap has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone, or just going
        return False


def wait_until_gone(pid: int, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its owner"
        os.sched_yield()


def test_a_reward_comes_back():
    with DeadlineVerifier(verifiers.length, timeout_s=10) as verifier:
        assert verifier("four", "answer") == 4.0
        assert verifier("four", None, {"bonus": 2}) == 6.0
        assert verifier("x" * 1_000_000, None) == 1e6


def test_the_child_imports_nothing_of_the_parent(obedient):
    assert obedient("heavy", None) == 0


def test_a_late_verifier_is_killed_and_replaced():
    with DeadlineVerifier(verifiers.obedient, timeout_s=1.0) as verifier:
        child, warden = verifier._child.pid, verifier._child._process.pid
        with pytest.raises(VerifierTimeout, match=r"tests.support.verifiers:obedient gave no reward within 1 s"):
            verifier("loop", None)
        assert not is_alive(child)
        assert not is_alive(warden)
        assert verifier("fine", None) == 1.0


@pytest.mark.slow
def test_what_a_late_verifier_started_goes_with_it(tmp_path):
    path = tmp_path / "pid"
    with DeadlineVerifier(verifiers.obedient, timeout_s=2) as verifier, pytest.raises(VerifierTimeout):
        verifier("child", None, {"path": str(path)})
    wait_until_gone(int(path.read_text()))


@pytest.mark.parametrize(("how", "what"), [("exit", "exit code 3"), ("segfault", "killed by SIGSEGV")])
def test_a_crash_is_named_and_survived(obedient, how, what):
    with pytest.raises(VerifierCrashed, match=f"the process of tests.support.verifiers:obedient ended: {what}"):
        obedient(how, None)
    assert obedient("fine", None) == 1.0


def test_a_death_between_calls_is_named_and_survived(obedient):
    os.kill(obedient._child.pid, signal.SIGKILL)
    obedient._child._process.wait()
    with pytest.raises(VerifierCrashed, match="killed by SIGKILL"):
        obedient("fine", None)
    assert obedient("fine", None) == 1.0


def test_an_exception_comes_back_with_its_traceback(obedient):
    with pytest.raises(VerifierError, match="raised KeyError: 'no such thing'") as caught:
        obedient("raise", None)
    assert 'raise KeyError("no such thing")' in caught.value.remote_traceback
    assert type(caught.value) is VerifierError
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("completion", "what"),
    [("nan", "returned nan, which is not a reward"), ("none", "returned None, which is not a reward")],
)
def test_something_else_than_a_number_is_no_reward(obedient, completion, what):
    with pytest.raises(VerifierError, match=what):
        obedient(completion, None)
    assert obedient("bool", None) == 1.0


def test_arguments_that_cannot_be_sent_leave_the_child_in_step(obedient):
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        obedient("fine", None, {"lock": threading.Lock()})
    assert obedient("fine", None) == 1.0


def test_calls_from_threads_take_turns():
    rewards: list[float] = []
    with DeadlineVerifier(verifiers.length, timeout_s=30) as verifier:
        threads = [
            threading.Thread(target=lambda size=size: rewards.append(verifier("x" * size, None))) for size in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(rewards) == list(range(8))


def test_closing_leaves_no_process():
    verifier = DeadlineVerifier(verifiers.process_id, timeout_s=10)
    child = int(verifier("", None))
    verifier.close()
    verifier.close()
    assert not is_alive(child)
    with pytest.raises(ValueError, match="tests.support.verifiers:process_id is closed"):
        verifier("", None)


@pytest.mark.slow
def test_a_verifier_that_is_dropped_leaves_no_process():
    verifier = DeadlineVerifier(verifiers.obedient, timeout_s=1.0)
    with pytest.raises(VerifierTimeout):
        verifier("loop", None)  # Its second process is meant as well.
    assert verifier("fine", None) == 1.0
    processes = [verifier._child.pid, verifier._child._process.pid]
    del verifier
    for process in processes:
        wait_until_gone(process)


def test_a_killed_parent_leaves_no_process():
    script = (
        "import sys; from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier\n"
        "verifier = DeadlineVerifier('os:getpgid', 10)\n"
        "sys.stdout.write(f'{verifier._child.pid} {verifier._child._process.pid}\\n')\n"
        "sys.stdout.flush(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        processes = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    for process in processes:
        wait_until_gone(process)


@pytest.mark.parametrize(
    "name", ["tests.support.verifiers:missing", "no_such_module:f", "tests.support.verifiers:not_a_function"]
)
def test_what_cannot_be_loaded_is_refused_at_once(name):
    with pytest.raises(VerifierError, match=f"{name} could not be loaded"):
        DeadlineVerifier(name, timeout_s=1)


@pytest.mark.parametrize("function", ["json.loads", ":f", "m:", lambda *_: 0.0, len.__call__])
def test_what_has_no_importable_name_is_refused(function):
    with pytest.raises(ValueError, match=r"not of the form|cannot be imported by another process"):
        DeadlineVerifier(function, timeout_s=1)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_limits_must_be_positive_and_finite(limit):
    with pytest.raises(ValueError, match="limits must be positive and finite"):
        DeadlineVerifier(verifiers.length, timeout_s=limit)


# -- hostile functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "what"),
    [
        ("abort", VerifierCrashed, "killed by SIGABRT"),
        ("kill-group", VerifierCrashed, "killed by SIGKILL"),
        ("real-time", VerifierCrashed, "killed by signal 35"),
        ("long-words", VerifierError, "raised ValueError: xxx"),
        ("forge", VerifierCrashed, "answered for its process"),
        ("half-forge", VerifierTimeout, "within 1 s"),
        ("stop", VerifierTimeout, "within 1 s"),
    ],
)
def test_a_hostile_function_costs_its_own_sample_alone(how, kind, what):
    with DeadlineVerifier(verifiers.obedient, timeout_s=1.0 if kind is VerifierTimeout else 20.0) as verifier:
        with pytest.raises(kind, match=what) as caught:
            verifier(how, None)
        assert len(str(caught.value)) < 50_000
        assert [verifier("fine", None), verifier("nothing", None)] == [1.0, 1.0]


def test_memory_beyond_the_limit_is_an_error_of_that_sample():
    with DeadlineVerifier(verifiers.obedient, timeout_s=20, memory_mb=512) as verifier:
        with pytest.raises(VerifierError, match="raised MemoryError"):
            verifier("memory", None)
        assert verifier("fine", None) == 1.0


def test_the_kernel_takes_a_verifier_first_when_memory_runs_out(obedient):
    assert Path(f"/proc/{obedient._child.pid}/oom_score_adj").read_text().strip() == "1000"


@pytest.mark.slow
def test_a_fork_bomb_leaves_no_process(tmp_path):
    path = tmp_path / "pids"
    with DeadlineVerifier(verifiers.obedient, timeout_s=2) as verifier:
        with pytest.raises(VerifierTimeout):
            verifier("bomb", None, {"path": str(path)})
        pids = [int(pid) for pid in path.read_text().split()]
        assert len(pids) == 2**5
        assert not [pid for pid in pids if is_alive(pid)]
        assert verifier("fine", None) == 1.0


def test_a_process_that_cut_every_tie_ends_with_its_verifier():
    with DeadlineVerifier(verifiers.obedient, timeout_s=20) as verifier:
        assert verifier("daemon", None) == 1.0
        (left,) = [pid for pid in children(verifier._child._process.pid) if pid != verifier._child.pid]
    assert not is_alive(left)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_function_that_kills_its_parent_kills_its_warden_not_the_job():
    with DeadlineVerifier(verifiers.obedient, timeout_s=5) as verifier:
        child = verifier._child.pid
        assert verifier("kill-parent", None) == 1.0
        assert verifier("fine", None) == 1.0
    wait_until_gone(child)


def test_what_a_function_prints_is_cut(capfd):
    with DeadlineVerifier(verifiers.obedient, timeout_s=60) as verifier:
        assert verifier("flood", None) == 1.0
    told = capfd.readouterr()
    assert told.out == ""
    assert 0 < len(told.err) <= 10_000


def test_the_module_imports_nothing_heavy():
    module = "dlrover.python.rl.environment.sandbox.reward_process"
    code = f"import sys, {module}; sys.exit(bool({{'numpy', 'torch'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
