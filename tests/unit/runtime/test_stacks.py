# SPDX-License-Identifier: Apache-2.0
"""Evidence of stuck and dead processes, taken from outside."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrover.python.rl.runtime.member.heartbeat import ray_worker_log_tail, stacks_of

WAITING = (
    "import threading\ndef stuck_here():\n    print('ready', flush=True)\n    threading.Event().wait()\nstuck_here()"
)
SPINNING = (
    "import threading\ndef spins_here():\n    print('ready', flush=True)\n    while True:\n        pass\nspins_here()"
)


@contextlib.contextmanager
def process(code):
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize(("code", "function"), [(WAITING, "stuck_here"), (SPINNING, "spins_here")])
def test_the_stack_names_the_function_a_process_is_in(code, function):
    with process(code) as child:
        assert function in stacks_of(child.pid, deadline_s=10.0)
        assert child.poll() is None


def test_a_stopped_process_shows_its_stack_and_goes_on_afterwards():
    code = """if True:
        import sys
        def reads_here():
            print('ready', flush=True)
            sys.exit(int(sys.stdin.readline()))
        reads_here()
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert "reads_here" in stacks_of(child.pid, deadline_s=10.0)
        child.send_signal(signal.SIGCONT)
        child.communicate("7\n", timeout=10)
        assert child.returncode == 7


def test_of_a_process_that_is_gone_it_says_so():
    child = subprocess.run(["true"], check=True, capture_output=True)
    assert child.returncode == 0
    text = stacks_of(2**22 - 1)
    assert text.startswith("no Python stacks of process 4194303: ")
    assert "o such process" in text


def test_without_the_tool_the_kernel_is_asked(tmp_path):
    with process(WAITING) as child:
        deadline_s = time.monotonic() + 10.0
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline_s
        text = stacks_of(child.pid, dumper=str(tmp_path / "none"))
    assert "none is not installed" in text
    assert "State: S (sleeping)" in text
    assert f"thread {child.pid} " in text


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Error: Permission denied (os error 13)' >&2; exit 1", "Permission denied"),
        ("exec sleep 60", "longer than"),
        ("exit 0", "found no stacks"),
    ],
)
def test_a_tool_that_is_refused_or_hangs_or_finds_nothing_costs_no_more_than_the_deadline(tmp_path, script, why):
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    started_s = time.monotonic()
    text = stacks_of(os.getpid(), deadline_s=0.5, dumper=str(tool))
    assert time.monotonic() - started_s < 5.0
    assert why in text.splitlines()[0]
    assert "State: " in text


def test_something_else_than_python_is_described_by_the_kernel():
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            text = stacks_of(child.pid, deadline_s=1.0)
        finally:
            child.kill()
    assert text.startswith(f"no Python stacks of process {child.pid}")
    assert "State: S" in text


@pytest.fixture
def session(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_the_last_lines_of_a_worker_without_rays_marks(session):
    text = ":job_id:01000000\n:actor_name:A\n" + "".join(f"line {number}\n" for number in range(50))
    (session / "logs/worker-ab12-01000000-4711.err").write_text(text)
    (session / "logs/worker-ab12-01000000-4711.out").write_text("said\n")
    (session / "logs/worker-ab12-01000000-711.err").write_text("another process\n")
    assert ray_worker_log_tail(session, 4711, lines=3) == "line 47\nline 48\nline 49"


def test_log_is_that_of_the_newest_process_with_the_pid(session):
    for age_s, name in ((100, "01000000"), (0, "02000000"), (200, "03000000")):
        file = session / f"logs/worker-ab12-{name}-4711.err"
        file.write_text(f"{name}\n")
        os.utime(file, (1e9 - age_s,) * 2)
    assert ray_worker_log_tail(session, 4711) == "02000000"


def test_stdout_fills_the_room_that_stderr_leaves(session):
    (session / "logs/worker-ab12-01000000-4711.err").write_text(":actor_name:A\nTraceback\nBoom\n")
    (session / "logs/worker-ab12-01000000-4711.out").write_text("one\ntwo\n")
    assert ray_worker_log_tail(session, 4711, lines=3) == "two\nTraceback\nBoom"


def test_a_huge_log_is_read_from_its_end(session):
    with (session / "logs/worker-ab12-01000000-4711.err").open("wb") as file:
        file.truncate(1 << 33)
        file.seek(0, os.SEEK_END)
        file.write(b"\n\xff last words\n")
    assert ray_worker_log_tail(session, 4711, lines=1).endswith(" last words")


def test_no_log_no_lines(tmp_path):
    assert ray_worker_log_tail(tmp_path / "nowhere", 1) == ""


def test_a_log_that_cannot_be_read_is_no_error(session):
    (session / "logs/worker-ab12-01000000-4711.err").mkdir()
    assert ray_worker_log_tail(session, 4711) == ""


def test_the_module_needs_no_ray():
    code = "import sys, dlrover.python.rl.runtime.member.heartbeat; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
