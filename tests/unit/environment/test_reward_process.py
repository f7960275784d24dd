# SPDX-License-Identifier: Apache-2.0
"""Verifiers in a process under a deadline, and pools of them."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dlrover.python.rl.common.errors import VerifierCrashed, VerifierError, VerifierTimeout
from dlrover.python.rl.environment.core.scoring import Completed
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier, VerifierPool
from tests.support import verifiers
from tests.support.processes import is_alive, wait_until_gone


@pytest.fixture(scope="module")
def obedient():
    with DeadlineVerifier("tests.support.verifiers:obedient", timeout_s=10) as verifier:
        yield verifier


def test_verifier_returns_a_reward():
    with DeadlineVerifier(verifiers.length, timeout_s=10) as verifier:
        assert verifier("four", "answer") == 4.0
        assert verifier("four", None, {"bonus": 2}) == 6.0
        assert verifier("x" * 1_000_000, None) == 1e6
        child = verifier._child.pid
    verifier.close()
    assert not is_alive(child)
    with pytest.raises(ValueError, match="tests.support.verifiers:length is closed"):
        verifier("", None)


def test_late_verifier_is_killed_and_replaced():
    with DeadlineVerifier(verifiers.obedient, timeout_s=1.0) as verifier:
        child, warden = verifier._child.pid, verifier._child._process.pid
        with pytest.raises(VerifierTimeout, match=r"tests.support.verifiers:obedient gave no reward within 1 s"):
            verifier("loop", None)
        assert not is_alive(child)
        assert not is_alive(warden)
        assert verifier("fine", None) == 1.0


@pytest.mark.parametrize(
    ("habit", "kind", "message"),
    [
        ("exit", VerifierCrashed, "the process of tests.support.verifiers:obedient ended: exit code 3"),
        ("segfault", VerifierCrashed, "the process of tests.support.verifiers:obedient ended: killed by SIGSEGV"),
        ("raise", VerifierError, "raised KeyError: 'no such thing'"),
        ("nan", VerifierError, "returned nan, which is not a reward"),
        ("none", VerifierError, "returned None, which is not a reward"),
    ],
)
def test_verifier_error_is_named_and_survived(obedient, habit, kind, message):
    with pytest.raises(kind, match=message) as caught:
        obedient(habit, None)
    assert type(caught.value) is kind
    assert ('raise KeyError("no such thing")' in caught.value.remote_traceback) == (habit == "raise")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert (obedient("fine", None), obedient("bool", None), obedient("heavy", None)) == (1.0, 1.0, 0.0)


def test_verifier_survives_unsendable_arguments_and_a_death(obedient):
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        obedient("fine", None, {"lock": threading.Lock()})
    assert Path(f"/proc/{obedient._child.pid}/oom_score_adj").read_text().strip() == "1000", "killed first"
    os.kill(obedient._child.pid, signal.SIGKILL)
    obedient._child._process.wait()
    with pytest.raises(VerifierCrashed, match="killed by SIGKILL"):
        obedient("fine", None)
    assert obedient("fine", None) == 1.0


def test_verifier_of_a_killed_parent_leaves_no_process():
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
    ("function", "timeout_s", "kind", "message"),
    [
        ("no_such_module:f", 1, VerifierError, "no_such_module:f could not be loaded"),
        ("tests.support.verifiers:not_a_function", 1, VerifierError, "not_a_function could not be loaded"),
        ("json.loads", 1, ValueError, "not of the form"),
        (":f", 1, ValueError, "not of the form"),
        (lambda *_: 0.0, 1, ValueError, "cannot be imported by another process"),
        (verifiers.length, 0, ValueError, "limits must be positive and finite"),
        (verifiers.length, float("nan"), ValueError, "limits must be positive and finite"),
        (verifiers.length, float("inf"), ValueError, "limits must be positive and finite"),
    ],
)
def test_verifier_refuses_wrong_arguments(function, timeout_s, kind, message):
    with pytest.raises(kind, match=message):
        DeadlineVerifier(function, timeout_s=timeout_s)


# -- hostile functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("habit", "kind", "message"),
    [
        ("abort", VerifierCrashed, "killed by SIGABRT"),
        ("kill-group", VerifierCrashed, "killed by SIGKILL"),
        ("real-time", VerifierCrashed, "killed by signal 35"),
        ("long-words", VerifierError, "raised ValueError: xxx"),
        ("forge", VerifierCrashed, "forged a reply of its process"),
        ("half-forge", VerifierTimeout, "within 1 s"),
        ("stop", VerifierTimeout, "within 1 s"),
    ],
)
def test_hostile_function_costs_only_its_sample(habit, kind, message):
    with DeadlineVerifier(verifiers.obedient, timeout_s=1.0 if kind is VerifierTimeout else 20.0) as verifier:
        with pytest.raises(kind, match=message) as caught:
            verifier(habit, None)
        assert len(str(caught.value)) < 50_000
        assert [verifier("fine", None), verifier("nothing", None)] == [1.0, 1.0]


def test_verifier_memory_limit_is_an_error_of_the_sample():
    with DeadlineVerifier(verifiers.obedient, timeout_s=20, memory_mb=512) as verifier:
        with pytest.raises(VerifierError, match="raised MemoryError"):
            verifier("memory", None)
        assert verifier("fine", None) == 1.0


@pytest.mark.slow
def test_fork_bomb_leaves_no_process(tmp_path):
    path = tmp_path / "pids"
    with DeadlineVerifier(verifiers.obedient, timeout_s=2) as verifier:
        with pytest.raises(VerifierTimeout):
            verifier("bomb", None, {"path": str(path)})
        pids = [int(pid) for pid in path.read_text().split()]
        assert len(pids) == 2**5
        assert not [pid for pid in pids if is_alive(pid)]
        assert verifier("fine", None) == 1.0


def test_closed_verifier_ends_detached_processes():
    with DeadlineVerifier(verifiers.obedient, timeout_s=20) as verifier:
        assert verifier("daemon", None) == 1.0
        warden = verifier._child._process.pid
        (detached,) = {child.pid for child in psutil.Process(warden).children()} - {verifier._child.pid}
    assert not is_alive(detached)


def test_verifier_whose_warden_is_killed_is_replaced():
    with DeadlineVerifier(verifiers.obedient, timeout_s=5) as verifier:
        child = verifier._child.pid
        assert verifier("kill-parent", None) == verifier("fine", None) == 1.0
    wait_until_gone(child)


def test_verifier_calls_of_threads_take_turns():
    with DeadlineVerifier(verifiers.length, timeout_s=30) as verifier, ThreadPoolExecutor(8) as threads:
        rewards = list(threads.map(lambda size: verifier("x" * size, None), range(8)))
    assert rewards == list(range(8))


def test_verifier_output_is_cut(capfd):
    with DeadlineVerifier(verifiers.obedient, timeout_s=60) as verifier:
        assert verifier("flood", None) == 1.0
    printed = capfd.readouterr()
    assert printed.out == ""
    assert 0 < len(printed.err) <= 10_000


def judge(pool, *completions):
    """Rewards or errors of the completions."""
    results = pool.score(map(Completed, completions))
    return [result if isinstance(result, VerifierError) else result.total for result in results]


@pytest.fixture
def pool():
    verifiers_of_two = VerifierPool(2, lambda: DeadlineVerifier(verifiers.obedient, timeout_s=1.0))
    yield verifiers_of_two
    verifiers_of_two.close()


def quickest_s(pool, completions, expected):
    """Seconds that judging takes where no neighbour of this process gets in its way."""
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        rewards = judge(pool, *completions)
        took_s.append(time.monotonic() - began_s)
        assert [reward for reward in rewards if not isinstance(reward, VerifierTimeout)] == expected
        if took_s[-1] < 1.0 + 0.5:
            break
    return min(took_s)


@pytest.mark.parametrize(
    ("completions", "finished"),
    [pytest.param(["loop", "loop", "fine", "fine"], 2, marks=pytest.mark.slow), (["loop", *["fine"] * 50], 50)],
)
def test_pool_judges_others_while_one_hangs(pool, completions, finished):
    assert quickest_s(pool, completions, [1.0] * finished) < 1.0 + 0.5


def test_pool_fails_only_the_bad_samples(pool):
    bad = ["abort", "raise", "exit", "segfault", "nan", "forge", "kill-group", "stop"]
    rewards = judge(pool, *(word for habit in bad for word in (habit, "fine")))
    assert all(isinstance(reward, VerifierError) for reward in rewards[::2])
    assert rewards[1::2] == [1.0] * len(bad)


def test_pool_failing_to_load_leaves_no_process():
    number, started = itertools.count(), []

    def start():
        if next(number) == 1:
            return DeadlineVerifier("tests.support.verifiers:missing", timeout_s=1)
        started.append(DeadlineVerifier(verifiers.length, timeout_s=1))
        return started[-1]

    with pytest.raises(VerifierError, match="could not be loaded"):
        VerifierPool(2, start)
    with pytest.raises(ValueError, match="is closed"):
        started[0]("x", None)
