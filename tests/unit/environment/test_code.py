"""Programs that a model wrote."""

import os
import time
from pathlib import Path

import pytest

from dlrover.python.rl.environment.code import Limits, code_block, python_tests, run_python


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def fenced(program, language="python"):
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


def test_a_program_reads_and_prints():
    ran = run_python("import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\n", "abc\n")
    assert (ran.stdout, ran.stderr, ran.code, ran.succeeded) == ("cba\n", "oh\n", 0, True)
    ran = run_python("raise SystemExit(3)")
    assert (ran.code, ran.succeeded) == (3, False)


def test_a_program_sees_nothing_of_this_process(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    ran = run_python("import os, sys\nprint(dict(os.environ), sys.path, os.listdir(), os.getcwd())\n")
    assert ran.succeeded
    assert "hunter2" not in ran.stdout


def test_098_a_program_that_does_not_end_is_ended_with_all_it_started(tmp_path):
    program = f"""
import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        signal.pause()
    os._exit(0)
os.wait()
9**9**9
"""
    began = time.monotonic()
    ran = run_python(program, limits=Limits(timeout_s=2.0))
    assert (ran.timed_out, ran.succeeded) == (True, False)
    assert time.monotonic() - began < 10
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, "a process outlived its program"
        os.sched_yield()


def test_memory_and_output_are_limited():
    ran = run_python("bytearray(1 << 34)")
    assert "MemoryError" in ran.stderr
    assert not ran.succeeded
    ran = run_python("while True: print('x' * 1000)", limits=Limits(output_bytes=10_000))
    assert len(ran.stdout) <= 10_000
    assert not ran.succeeded


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fenced("x = 1"), "x = 1\n"),
        (fenced("x = 1", ""), "x = 1\n"),
        (fenced("a") + fenced("b", "py"), "b\n"),
        (fenced("rm", "bash"), None),
        ("no code", None),
    ],
)
def test_the_last_block_of_python_counts(text, expected):
    assert code_block(text) == expected


def test_tests_that_run_after_the_program():
    tests = {"tests": "assert double(2) == 4\nassert double(-1) == -2\n"}
    assert python_tests(fenced("def double(x):\n    return 2 * x"), None, tests) == 1.0
    assert python_tests(fenced("def double(x):\n    return x * x"), None, tests) == 0.0
    assert python_tests(fenced("def double(x):\n    return 2 * x\nraise SystemExit(0)"), None, tests) == 0.0
    assert python_tests(fenced("import os\nos._exit(0)"), None, tests) == 0.0
    assert python_tests("def double(x): return 2 * x", None, tests) == 0.0


def test_cases_of_input_and_output():
    tests = {"tests": [{"input": "2\n", "output": "4"}, {"input": "5", "output": "10 \n"}]}
    assert python_tests(fenced("print(2 * int(input()))"), None, tests) == 1.0
    assert python_tests(fenced("print(4)"), None, tests) == 0.0
    for wrong in ({}, {"tests": []}, {"tests": [{"input": 1, "output": "x"}]}, {"tests": ["x"]}):
        with pytest.raises(ValueError, match="must be Python text, or a list"):
            python_tests(fenced("x"), None, wrong)
