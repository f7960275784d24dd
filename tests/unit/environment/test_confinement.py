# SPDX-License-Identifier: Apache-2.0
"""What programs that try it can do, at each level of confinement and without any."""

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.sandbox import confinement
from dlrover.python.rl.environment.sandbox.confinement import BUBBLEWRAP, LEVELS, LIMITS, SETTING
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier
from dlrover.python.rl.environment.verifiers import code
from dlrover.python.rl.environment.verifiers.code import ProgramLimits, run_python

NONE = "none"
BOTH = {BUBBLEWRAP, LIMITS}
ONLY_BUBBLEWRAP = {BUBBLEWRAP}

ATTACKS = {
    # What it does, harmless and bounded; the levels that stop it; it prints "done" if it has done it.
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
    "gain privileges": (
        "status = open('/proc/self/status').read(); print('done' if 'NoNewPrivs:\\t0' in status else '')",
        BOTH,
    ),
    "have many processes": (
        "import resource; print('done' if not 0 < resource.getrlimit(resource.RLIMIT_NPROC)[0] < 10000 else '')",
        BOTH,
    ),
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
    if level == NONE:
        # As the same program would run without any of this; its own limits stay high here, so that no harm is done.
        environment = {**os.environ, "CANARY": "x"}
        ran = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            close_fds=False,
            check=False,
        )
        return "done" in ran.stdout
    monkeypatch.setenv("CANARY", "x")
    monkeypatch.setattr(code, "confinement", lambda: level)
    return "done" in run_python(program, limits=ProgramLimits(timeout_s=20.0, memory_mb=1024)).stdout


def needs(level):
    if level == BUBBLEWRAP and confinement.find_bubblewrap_fault():
        pytest.skip(confinement.find_bubblewrap_fault())


@pytest.mark.parametrize("level", [NONE, *LEVELS])
@pytest.mark.parametrize("attack", ATTACKS)
def test_each_level_stops_what_it_says_and_without_it_it_works(attack, level, canaries, tmp_path, monkeypatch):
    needs(level)
    monkeypatch.chdir(tmp_path)
    text, stopped_by = ATTACKS[attack]
    program = text
    for name, value in canaries.items():
        program = program.replace(f"{{{name}}}", str(value))
    assert has_done(program, level, monkeypatch) == (level not in stopped_by)


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_that_prints_without_end_is_ended_and_does_not_fill_the_disk(level, monkeypatch):
    needs(level)
    monkeypatch.setattr(code, "confinement", lambda: level)
    ran = run_python("while True: print('x' * 1000)", limits=ProgramLimits(timeout_s=10.0, output_bytes=1 << 16))
    assert not ran.succeeded and len(ran.stdout) == 1 << 16


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_that_sleeps_is_ended_in_time(level, monkeypatch):
    needs(level)
    monkeypatch.setattr(code, "confinement", lambda: level)
    began_s = time.monotonic()
    ran = run_python("import time; time.sleep(60)", limits=ProgramLimits(timeout_s=1.0))
    assert ran.timed_out and time.monotonic() - began_s < 20


def test_with_bubblewrap_all_files_together_are_limited(monkeypatch):
    needs(BUBBLEWRAP)
    monkeypatch.setattr(code, "confinement", lambda: BUBBLEWRAP)
    program = "for n in range(20): open(str(n), 'wb').write(bytes(1 << 18))\nprint('done')"
    ran = run_python(program, limits=ProgramLimits(output_bytes=1 << 20))
    assert "No space left" in ran.stderr and "done" not in ran.stdout


@pytest.mark.parametrize(("function", "is_named"), [("python_tests", True), ("exact", False)])
def test_level_is_named_where_programs_run_only(capfd, monkeypatch, function, is_named):
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setenv("PATH", "")  # without bubblewrap
    with closing(DeadlineVerifier(function, timeout_s=20.0)) as verifier:
        assert confinement.sandbox_level() != "bubblewrap"
        for _ in range(2):
            verifier("```python\nx = 1\n```", "1", {"tests": "assert x == 1"})
    message = "programs that a model wrote are confined by limits (bubblewrap is not installed)"
    assert capfd.readouterr().err.count(message) == is_named


def test_a_level_that_is_asked_for_and_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv(SETTING, "bubblewrap")
    confinement.confinement.cache_clear()
    with pytest.raises(VerifierError, match="cannot confine programs: bubblewrap is not installed"):
        confinement.confinement()
    assert confinement.sandbox_level() == "none"
    monkeypatch.setenv(SETTING, "firejail")
    with pytest.raises(VerifierError, match="'firejail' is neither bubblewrap nor limits"):
        confinement.confinement()
    monkeypatch.delenv(SETTING)
    assert confinement.confinement() == LIMITS
    for flag in ("_CLONE_NEWUSER", "_CLONE_NEWNET", "_CLONE_NEWIPC"):
        monkeypatch.setattr(confinement, flag, 0)  # which every kernel permits
    assert confinement.sandbox_level() == "namespaces"
    monkeypatch.setattr(confinement, "_CLONE_NEWNET", 1)  # which none does
    assert confinement.sandbox_level() == "limits"
    confinement.confinement.cache_clear()
