# SPDX-License-Identifier: Apache-2.0
"""Programs that a model wrote: how they are found, run, confined and tested."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from functools import partial

import pytest

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.sandbox import confinement
from dlrover.python.rl.environment.sandbox.confinement import BUBBLEWRAP, LEVELS, LIMITS, SETTING
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier
from dlrover.python.rl.environment.verifiers import code
from dlrover.python.rl.environment.verifiers.code import ProgramLimits, code_block, python_tests, run_python
from dlrover.python.rl.environment.verifiers.hidden_tests import hide_expected
from tests.support.manual_clock import within
from tests.support.processes import wait_until_gone


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Programs without a limit of their own have a minute: interpreters start slowly on a busy machine."""
    monkeypatch.setattr(code, "ProgramLimits", partial(ProgramLimits, timeout_s=60.0))


def fenced(program, language="python"):
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


def test_program_reads_and_prints():
    ran = run_python("import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\n", "abc\n")
    assert (ran.stdout, ran.stderr, ran.code, ran.succeeded) == ("cba\n", "oh\n", 0, True)
    assert not run_python("raise SystemExit(3)").succeeded


@pytest.mark.slow
@pytest.mark.feature(98)
def test_program_without_an_end_is_ended_with_its_processes(tmp_path, monkeypatch):
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
    with within(10):
        ran = run_python(program, limits=ProgramLimits(timeout_s=2.0))
        assert (ran.timed_out, ran.succeeded) == (True, False)
    wait_until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("act", ["os.mkfifo('stdout')", "os.symlink('/dev/zero', 'stdout')"])
def test_program_replacing_its_output_file_is_not_read(act):
    result = run_python(f"import os\nos.remove('stdout')\n{act}")
    assert (result.stdout, result.timed_out) == ("", False)


FENCE = "`" * 3
BLOCKS = {
    # text, its program
    "python": (fenced("x = 1"), "x = 1\n"),
    "no language": (fenced("x = 1", ""), "x = 1\n"),
    "the last": (fenced("a") + fenced("b", "py"), "b\n"),
    "the last of Python": (fenced("a") + fenced("b", ""), "a\n"),
    "another language": (fenced("rm", "bash"), None),
    "none": ("no code", None),
    "a version": (fenced("x = 1", "python3.11 title=x"), "x = 1\n"),
    "a span in prose": (f"We call {FENCE}input(){FENCE} once:\n\n" + fenced("x = 1"), "x = 1\n"),
    "a span that begins a line": (f"{FENCE}input(){FENCE} is called:\n" + fenced("x = 1"), "x = 1\n"),
    "a mention in prose": (f"I open it with {FENCE} now.\n" + fenced("x = 1"), "x = 1\n"),
    "a string": (fenced(f"mark = '{FENCE}'"), f"mark = '{FENCE}'\n"),
    "a docstring": (fenced(f"def f():\n    {FENCE}\n    x"), f"def f():\n    {FENCE}\n    x\n"),
    "an end with text": (fenced(f"x = 1\n{FENCE}python\ny"), f"x = 1\n{FENCE}python\ny\n"),
    "tildes": (f"~~~python\nx = 1\n{FENCE}\n~~~", f"x = 1\n{FENCE}\n"),
    "three columns": (f"   {FENCE}py\n   x = 1\n  y = 2\n {FENCE}", "x = 1\ny = 2\n"),
    "four columns": (f"Text:\n\n    {FENCE}py\n    x = 1\n    {FENCE}", None),
    "a list": (f"10. Do\n\n    {FENCE}py\n    x = 1\n    {FENCE}", "x = 1\n"),
    "no end": (f"{FENCE}py\nx = 1\ny = 2", "x = 1\ny = 2\n"),
    "ends of lines": (f"{FENCE}py\r\nx = 1\r\n{FENCE}\r\ny", "x = 1\n"),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_code_block_follows_the_rule_for_fences(block):
    text, program = BLOCKS[block]
    assert code_block(text) == program


ENDS = [("", "\n"), ("> ", "\nx\n"), ("- ", "\n"), ("", "`\n~~~\n")]
HOSTILE_UNITS = ["`", "~", " ", "\t", "- ", "1. ", "> ", "- a\n", *(f"{start}{FENCE}{end}" for start, end in ENDS)]


@pytest.mark.parametrize("unit", HOSTILE_UNITS)
def test_code_block_takes_linear_time(unit):
    with within(10, time.process_time):
        code_block(unit * (400_000 // len(unit)))


@pytest.mark.feature(98)
def test_expected_values_are_hidden_from_the_program():
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
    called = "def check(double):\n    assert double(2) == 4, 'it is 4'\ncheck(double)"
    for tests in ("assert double(2) == 4\nassert double(-1) == -2\n", called):
        assert python_tests(fenced(knows_the_protocol), None, {"tests": tests}) == 0.0
        assert "4" not in hide_expected(tests).text


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
        ("def f(x): return int(not x)", "assert f(0) == True\nassert not (f(0) is True)"),
        ("f = 1\nif __name__ == '__main__':\n    f = input()", "assert f == 1"),
        ("def f(x): return x", "def check(c): assert c(2) == 5\ncheck = lambda c: None\ncheck(f)\nassert f(2) == 2"),
        ("def f(x): return not x", "assert f(0) is True\nassert not (f(0) is 1)"),
    ],
)
def test_python_tests_pass_right_and_fail_wrong_programs(program, tests):
    assert python_tests(fenced(program), None, {"tests": tests}) == 1.0
    assert python_tests(fenced(program), None, {"tests": f"{tests}\nassert 1 == 2"}) == 0.0


def test_python_tests_need_all_due_comparisons():
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


ROWS = [{"input": "2\n", "output": "4"}, {"input": "5", "output": "10 \n"}]


@pytest.mark.parametrize("tests", [ROWS, json.dumps(ROWS), {"inputs": ["2", "5"], "outputs": ["4", "10"]}], ids=type)
def test_python_tests_of_input_and_output(tests):
    right = "print(2 * int(input()))"
    rewards = [python_tests(text, None, {"tests": tests}) for text in (fenced(right), fenced("print(4)"), right)]
    assert rewards == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("wrong", [None, [], [{"input": 1, "output": "x"}], [3], "a ("])
def test_python_tests_of_no_form_are_refused(wrong):
    message = "the tests are not Python: line 1" if wrong == "a (" else "must be Python text, or a list"
    with pytest.raises(ValueError, match=message):
        python_tests(fenced("x"), None, {} if wrong is None else {"tests": wrong})


def test_python_tests_have_one_deadline_together():
    waits = fenced("import time\ntime.sleep(0.3)")
    tests = {"tests": [{"input": "", "output": ""}] * 4}
    assert python_tests(waits, None, {**tests, "timeout_s": 1.0}) == 0.0
    for timeout_s in (60.0, None):  # null, as in a row that lacks it
        assert python_tests(waits, None, {**tests, "timeout_s": timeout_s}) == 1.0


NEST = "import os\nfor _ in range(3000):\n    os.mkdir('a', 0o300)\n    os.chdir('a')\n    os.symlink('/', 'link')\n"


@pytest.mark.parametrize("tests", [[{"input": "1\n", "output": "2\n"}], "assert double(2) == 4"])
def test_program_nesting_folders_is_scored_and_removed(tests, tmp_path, monkeypatch):
    monkeypatch.setattr(code, "confinement", lambda: LIMITS)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = f"{NEST}def double(x):\n    return 2 * x\nif __name__ == '__main__':\n    print(double(int(input())))"
    assert python_tests(fenced(program), None, {"tests": tests, "timeout_s": 60}) == 1.0
    assert list(tmp_path.iterdir()) == []


def test_remove_tree_follows_no_links(tmp_path):
    (target := tmp_path / "kept").mkdir()
    (target / "file").touch()
    (link := tmp_path / "link").symlink_to(target)
    confinement.remove_tree(link)
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]


def test_scratch_folder_not_removable_fails_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with confinement.scratch_folder("program-") as folder:
        folder.rmdir()
    assert "could not be removed" in caplog.text


BOTH, ONLY_BUBBLEWRAP = {BUBBLEWRAP, LIMITS}, {BUBBLEWRAP}

ATTACKS = {
    # a harmless program, which prints "done" if it succeeds; the levels that stop it
    "read a token": ("print('done' if open('{folder}/token').read() else '')", ONLY_BUBBLEWRAP),
    "write outside": ("open('{folder}/written', 'w').write('x'); print('done')", ONLY_BUBBLEWRAP),
    "see a process": ("import os; os.kill({pid}, 0); print('done')", ONLY_BUBBLEWRAP),
    "read an environment": ("print('done' if b'CANARY' in open('/proc/{pid}/environ', 'rb').read() else '')", BOTH),
    "connect": ("import socket; socket.create_connection(('127.0.0.1', {port}), 3); print('done')", BOTH),
    "use a descriptor": ("import os; print('done' if os.fstat({descriptor}) else '')", BOTH),
    "see the environment": ("import os; print('done' if 'CANARY' in os.environ else '')", BOTH),
    "open many files": ("files = [open('/dev/null') for _ in range(500)]; print('done')", BOTH),
    "write a large file": ("open('large', 'wb').write(bytes(4 << 20)); print('done')", BOTH),
    "take much memory": ("taken = bytearray(2 << 30); print('done')", BOTH),
    "gain privileges": ("print('done' if 'NoNewPrivs:\\t0' in open('/proc/self/status').read() else '')", BOTH),
    "fork": ("import resource as r; print('done' if r.getrlimit(r.RLIMIT_NPROC)[0] % 2**31 > 9999 else '')", BOTH),
}


@pytest.fixture
def canaries(tmp_path):
    """A private file, another process of this user with a secret, a server on loopback, an open file."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    sleeper = subprocess.Popen(["sleep", "60"], env={"CANARY": "secret"})
    server = socket.create_server(("127.0.0.1", 0))
    descriptor = os.open(tmp_path / "token", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    yield {"folder": tmp_path, "pid": sleeper.pid, "port": server.getsockname()[1], "descriptor": descriptor}
    os.close(descriptor)
    server.close()
    sleeper.kill()
    sleeper.wait()


def has_done(program, level, monkeypatch):
    if level == "none":
        options = {"timeout": 60, "env": {**os.environ, "CANARY": "x"}, "close_fds": False, "check": False}
        return b"done" in subprocess.run([sys.executable, "-c", program], capture_output=True, **options).stdout
    monkeypatch.setenv("CANARY", "x")
    monkeypatch.setattr(code, "confinement", lambda: level)
    return "done" in run_python(program, limits=ProgramLimits(timeout_s=20.0, memory_mb=1024)).stdout


def needs(level):
    if level == BUBBLEWRAP and (fault := confinement.find_bubblewrap_fault()):
        pytest.skip(fault)


@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize("attack", ATTACKS)
def test_confinement_level_stops_its_attacks(attack, level, canaries, tmp_path, monkeypatch):
    needs(level)
    monkeypatch.chdir(tmp_path)
    program, stopped_by = ATTACKS[attack]
    for name, value in canaries.items():
        program = program.replace(f"{{{name}}}", str(value))
    assert has_done(program, level, monkeypatch) == (level not in stopped_by)


@pytest.mark.parametrize("level", LEVELS)
def test_confinement_limits_output_and_time(level, monkeypatch):
    needs(level)
    monkeypatch.setattr(code, "confinement", lambda: level)
    ran = run_python("while True: print('x' * 1000)", limits=ProgramLimits(timeout_s=10.0, output_bytes=1 << 16))
    assert not ran.succeeded and len(ran.stdout) == 1 << 16
    with within(20):
        assert run_python("import time; time.sleep(60)", limits=ProgramLimits(timeout_s=1.0)).timed_out


def test_confinement_by_bubblewrap_limits_files_together(monkeypatch):
    needs(BUBBLEWRAP)
    monkeypatch.setattr(code, "confinement", lambda: BUBBLEWRAP)
    program = "for n in range(20): open(str(n), 'wb').write(bytes(1 << 18))\nprint('done')"
    ran = run_python(program, limits=code.ProgramLimits(output_bytes=1 << 20))
    assert "No space left" in ran.stderr and "done" not in ran.stdout


@pytest.mark.parametrize(("function", "count"), [("python_tests", 1), ("exact", 0)])
def test_confinement_level_is_logged_where_programs_run(capfd, monkeypatch, function, count):
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setenv("PATH", "")  # without bubblewrap
    with closing(DeadlineVerifier(function, timeout_s=20.0)) as verifier:
        assert confinement.sandbox_level() != "bubblewrap"
        for _ in range(2):
            verifier("```python\nx = 1\n```", "1", {"tests": "assert x == 1"})
    message = "programs that a model wrote are confined by limits (bubblewrap is not installed)"
    assert capfd.readouterr().err.count(message) == count


def test_confinement_level_not_available_is_an_error(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv(SETTING, "bubblewrap")
    confinement.confinement.cache_clear()
    with pytest.raises(VerifierError, match="cannot confine programs: bubblewrap is not installed"):
        confinement.confinement()
    assert confinement.sandbox_level() == "none"
    monkeypatch.setenv(SETTING, "firejail")
    with pytest.raises(VerifierError, match="no sandbox is called 'firejail'"):
        confinement.confinement()
    monkeypatch.delenv(SETTING)
    assert confinement.confinement() == LIMITS
    for flag in ("_CLONE_NEWUSER", "_CLONE_NEWNET", "_CLONE_NEWIPC"):
        monkeypatch.setattr(confinement, flag, 0)  # which every kernel permits
    assert confinement.sandbox_level() == "namespaces"
    monkeypatch.setattr(confinement, "_CLONE_NEWNET", 1)  # which none does
    assert confinement.sandbox_level() == "limits"
    confinement.confinement.cache_clear()
