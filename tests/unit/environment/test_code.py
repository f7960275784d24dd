# SPDX-License-Identifier: Apache-2.0
"""Programs that a model wrote."""

import os
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from dlrover.python.rl.environment.sandbox.confinement import LIMITS, remove_tree, scratch_folder
from dlrover.python.rl.environment.verifiers import code
from dlrover.python.rl.environment.verifiers.code import (
    ProgramLimits,
    code_block,
    hide_expected,
    python_tests,
    run_python,
)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone, or just going
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


@pytest.mark.slow
@pytest.mark.feature(98)
def test_a_program_that_does_not_end_is_ended_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "confinement", lambda: LIMITS)  # so that it can tell its number
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
    ran = run_python(program, limits=ProgramLimits(timeout_s=2.0))
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
    ran = run_python("while True: print('x' * 1000)", limits=ProgramLimits(output_bytes=10_000))
    assert len(ran.stdout) <= 10_000
    assert not ran.succeeded


@pytest.mark.parametrize("act", ["os.mkfifo('stdout')", "os.symlink('/dev/zero', 'stdout')"])
def test_what_a_program_puts_in_its_outputs_place_is_not_read(act):
    result = run_python(f"import os\nos.remove('stdout')\n{act}")
    assert (result.stdout, result.timed_out) == ("", False)


FENCE = "`" * 3
BLOCKS = {
    # Text, its program, and its program before the commit that added the row.
    "python": (fenced("x = 1"), "x = 1\n", "x = 1\n"),
    "no language": (fenced("x = 1", ""), "x = 1\n", "x = 1\n"),
    "the last": (fenced("a") + fenced("b", "py"), "b\n", "b\n"),
    "the last of Python": (fenced("a") + fenced("b", ""), "a\n", "a\n"),
    "another language": (fenced("rm", "bash"), None, None),
    "none": ("no code", None, None),
    "a version": (fenced("x = 1", "python3.11 title=x"), "x = 1\n", "x = 1\n"),
    "a span in prose": (f"We call {FENCE}input(){FENCE} once:\n\n" + fenced("x = 1"), "x = 1\n", None),
    "a span that begins a line": (f"{FENCE}input(){FENCE} is called:\n" + fenced("x = 1"), "x = 1\n", None),
    "a mention in prose": (f"I open it with {FENCE} now.\n" + fenced("x = 1"), "x = 1\n", None),
    "a string": (fenced(f"mark = '{FENCE}'"), f"mark = '{FENCE}'\n", "mark = '"),
    "a docstring": (fenced(f"def f():\n    {FENCE}\n    x"), f"def f():\n    {FENCE}\n    x\n", "def f():\n"),
    "an end with text": (fenced(f"x = 1\n{FENCE}python\ny"), f"x = 1\n{FENCE}python\ny\n", "x = 1\n"),
    "tildes": (f"~~~python\nx = 1\n{FENCE}\n~~~", f"x = 1\n{FENCE}\n", None),
    "three columns": (f"   {FENCE}py\n   x = 1\n  y = 2\n {FENCE}", "x = 1\ny = 2\n", " x = 1\ny = 2\n"),
    "four columns": (f"Text:\n\n    {FENCE}py\n    x = 1\n    {FENCE}", None, "x = 1\n"),
    "a list": (f"10. Do\n\n    {FENCE}py\n    x = 1\n    {FENCE}", "x = 1\n", "x = 1\n"),
    "no end": (f"{FENCE}py\nx = 1\ny = 2", "x = 1\ny = 2\n", None),
    "ends of lines": (f"{FENCE}py\r\nx = 1\r\n{FENCE}\r\ny", "x = 1\n", "x = 1\r\n"),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_the_program_is_found_by_the_rule_for_fences(block):
    text, program, before = BLOCKS[block]
    assert code_block(text) == program, f"before: {before!r}"


ENDS = [("", "\n"), ("> ", "\nx\n"), ("- ", "\n"), ("", "`\n~~~\n")]
HOSTILE = ["`", "~", " ", "\t", "- ", "1. ", "> ", "- a\n", *(f"{start}{FENCE}{end}" for start, end in ENDS)]


@pytest.mark.parametrize("unit", HOSTILE)
def test_blocks_are_found_in_linear_time(unit):
    began_s = time.process_time()
    code_block(unit * (400_000 // len(unit)))
    assert time.process_time() - began_s < 10


LITERAL = "assert double(2) == 4\nassert double(-1) == -2\n"


@pytest.fixture
def patient(monkeypatch):
    """What is judged is the program, not how busy the machine is."""
    monkeypatch.setattr(code, "ProgramLimits", partial(ProgramLimits, timeout_s=60.0))


@pytest.mark.feature(98)
def test_what_is_expected_is_never_where_the_program_is():
    knows_the_protocol = """
import os, sys

class Alike:
    def __eq__(self, other): return True
    def __repr__(self): return "4"

def double(x):
    frame = sys._getframe(1)
    while "channel" not in frame.f_locals:
        frame = frame.f_back
    channel = frame.f_locals["channel"]
    size = int.from_bytes(os.read(channel, 8), "little")
    os.write(channel, b"over " + os.read(channel, size) + b"\\n")
    return Alike()
"""
    assert python_tests(fenced(knows_the_protocol), None, {"tests": LITERAL}) == 0.0
    called = "def check(double):\n    assert double(2) == 4, 'it is 4'\ncheck(double)"
    assert python_tests(fenced(knows_the_protocol), None, {"tests": called}) == 0.0
    assert "4" not in hide_expected(called).text
    assert (
        python_tests(
            fenced("class Alike(int):\n    __eq__ = lambda *_: True\ndouble = Alike"), None, {"tests": LITERAL}
        )
        == 0.0
    )


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(x): return {x: [(1, None, b'x', {2.5})]}", "assert {1: [(1, None, b'x', {2.5})]} == f(1)"),
        ("from fractions import Fraction as f", "assert f(1, 2) == 0.5\nassert (f(1) is None) == False"),
        ("def f(x): x.sort()", "x = [2, 1]\nassert f(x) is None\nassert x == [1, 2]"),
        ("def f(x): raise KeyError(x)", "try:\n    f(1)\n    assert 1 == 2\nexcept KeyError: pass"),
        ("def f(x): return x", "for x in range(3):\n    assert f(x) == x\n    if x > 1: assert f(x) == 2"),
        ("def f(): return __name__, __file__[-10:]", "assert f() == ('program', 'program.py')"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'",
            "assert P(1) == P(1)\nassert P(1).x == 1",
        ),
        ("f = 1\nif __name__ == '__main__':\n    f = input()", "assert f == 1"),
        ("def f(x): return x", "def check(c): assert c(2) == 5\ncheck = lambda c: None\ncheck(f)\nassert f(2) == 2"),
        ("def f(x): return not x", "assert f(0) is True\nassert not (f(0) is 1)"),
    ],
)
@pytest.mark.usefixtures("patient")
def test_tests_mean_what_they_say(program, tests):
    assert python_tests(fenced(program), None, {"tests": tests}) == 1.0
    assert python_tests(fenced(program), None, {"tests": f"{tests}\nassert 1 == 2"}) == 0.0


@pytest.mark.usefixtures("patient")
def test_one_is_not_true():
    program = fenced("def f(x): return int(not x)")
    assert python_tests(program, None, {"tests": "assert f(0) == True"}) == 1.0
    assert python_tests(program, None, {"tests": "assert f(0) is True"}) == 0.0


@pytest.mark.usefixtures("patient")
def test_what_has_to_have_been_compared():
    tests = """
def check(f):
    assert f(0) == 1
    if f(1):
        return
    assert f(2) == 3
def again(f): assert f(3) == 4
def again(f): assert f(4) == 5
def never(f): assert f(5) == 6
def later(f):
    assert f(6) == 7
    yield
check(f)
again(f)
later(f)
for x in (): assert f(7) == 8
assert f(8) == 9
"""
    withheld = hide_expected(tests)
    assert withheld.expected == (1, 3, 4, 5, 6, 7, 8, 9)
    assert {withheld.expected[number] for number in withheld.due} == {1, 9}
    assert python_tests(fenced("f = lambda x: x + 1"), None, {"tests": tests}) == 1.0


def test_tests_that_are_no_python_are_no_programs_fault():
    with pytest.raises(ValueError, match="the tests are not Python: line 1"):
        python_tests(fenced("x = 1"), None, {"tests": "assert ("})


def test_cases_of_input_and_output():
    tests = {"tests": [{"input": "2\n", "output": "4"}, {"input": "5", "output": "10 \n"}]}
    assert python_tests(fenced("print(2 * int(input()))"), None, tests) == 1.0
    assert python_tests(fenced("print(4)"), None, tests) == 0.0
    assert python_tests("print(2 * int(input()))", None, tests) == 0.0
    for wrong in ({}, {"tests": []}, {"tests": [{"input": 1, "output": "x"}]}, {"tests": [3]}):
        with pytest.raises(ValueError, match="must be Python text, or a list"):
            python_tests(fenced("x"), None, wrong)


def test_all_cases_have_one_deadline_together():
    waits = fenced("import time\ntime.sleep(0.3)")
    tests = {"tests": [{"input": "", "output": ""}] * 4}
    assert python_tests(waits, None, {**tests, "timeout_s": 1.0}) == 0.0
    for given in (60.0, None):  # null, as in a row that lacks it
        assert python_tests(waits, None, {**tests, "timeout_s": given}) == 1.0


def test_tests_that_hang_end_at_their_deadline():
    tests = {"tests": "assert f() is None", "timeout_s": 0.5}
    assert python_tests(fenced("def f():\n    while True: pass"), None, tests) == 0.0


DOUBLE, WRONG = (f"```python\ndef double(x):\n    return {factor} * x\n```" for factor in (2, 3))
CASES = '[{"input": "1\\n", "output": "2\\n"}]'


@pytest.mark.parametrize(
    ("completion", "tests", "reward"),
    [
        ("```python\nprint('wrong')\n```", CASES, 0.0),
        ("```python\nprint(2 * int(input()))\n```", CASES, 1.0),
        ("```python\nprint(2 * int(input()))\n```", {"inputs": ["1", "2"], "outputs": ["2", "4"]}, 1.0),
        ("```python\nprint(2)\n```", {"inputs": ["1", "2"], "outputs": ["2", "4"]}, 0.0),
        (WRONG, "def test_double():\n    assert double(2) == 4", 0.0),
        (DOUBLE, "def test_double():\n    assert double(2) == 4", 1.0),
        (f"{DOUBLE}\nIt prints\n```\n4\n```", "assert double(2) == 4", 1.0),
        ("1. Do\n   ```python\n   def double(x):\n       return 2 * x\n   ```", "assert double(2) == 4", 1.0),
    ],
)
def test_tests_are_cases_as_text_or_functions_and_blocks_may_be_indented(completion, tests, reward):
    assert python_tests(completion, None, {"tests": tests}) == reward


NEST = "import os\nfor _ in range(3000):\n    os.mkdir('a', 0o300)\n    os.chdir('a')\n    os.symlink('/', 'link')\n"


@pytest.mark.parametrize("tests", [CASES, "assert double(2) == 4"])
def test_a_program_that_nests_folders_is_scored_and_its_folder_removed(tests, tmp_path, monkeypatch):
    monkeypatch.setattr(code, "confinement", lambda: LIMITS)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = f"{NEST}def double(x):\n    return 2 * x\nif __name__ == '__main__':\n    print(double(int(input())))"
    assert python_tests(fenced(program), None, {"tests": tests, "timeout_s": 60}) == 1.0
    assert list(tmp_path.iterdir()) == []


def test_what_a_removed_folder_was_replaced_by_is_not_followed(tmp_path):
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").touch()
    (link := tmp_path / "link").symlink_to(kept)
    remove_tree(link)
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]


def test_a_folder_that_cannot_be_removed_fails_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("program-") as folder:
        folder.rmdir()
    assert "could not be removed" in caplog.text
