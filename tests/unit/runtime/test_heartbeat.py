# SPDX-License-Identifier: Apache-2.0
"""Heartbeats and their lease, notices of departure, counts of OOM kills, and stacks of stuck processes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.spec import LivenessSpec
from dlrover.python.rl.control.events import Cause, CauseKind, Process
from dlrover.python.rl.runtime.member import heartbeat
from dlrover.python.rl.runtime.member.heartbeat import Heartbeat, HeartbeatSender, count_oom_kills, stacks_of
from tests.support.commands import wait_for
from tests.support.manual_clock import ManualClock

QUICK = LivenessSpec(beat_s=0.001, lease_s=10.0)
DEADLINE_S = 10.0


class Master:
    """Takes beats in, and gives its answers in turns; a beat takes 4 s of the clock's."""

    def __init__(self, *answers, clock):
        self.beats, self.several = [], threading.Event()
        self._answers, self._clock = answers, clock

    def __call__(self, beat):
        self.beats.append(beat)
        self._clock.advance(4.0)
        if len(self.beats) >= 5:
            self.several.set()
        answer = self._answers[(len(self.beats) - 1) % len(self._answers)]
        if isinstance(answer, Exception):
            raise answer
        return answer


AWAY = ConnectionError("away")


@pytest.mark.parametrize(
    ("answers", "beats", "message"),
    [
        ([True], None, ""),
        ([AWAY, True], None, ""),  # it is 8 s from one answer to the next
        ([False], 1, "taken its place"),
        ([AWAY], 3, "no master for 12 s (ConnectionError)"),  # the third beat is after the lease
    ],
    ids=["answers", "some answers", "replaced", "no master"],
)
def test_process_beats_until_it_is_replaced_or_its_lease_ends(answers, beats, message):
    ended, reasons, clock = threading.Event(), [], ManualClock()
    master = Master(*answers, clock=clock)

    def end(reason):
        reasons.append(reason)
        ended.set()

    beater = HeartbeatSender(lambda: Heartbeat(ProcessId("ROLLOUT", 1), 3), master, QUICK, end, clock)
    beater.start()
    if beats is None:
        assert master.several.wait(DEADLINE_S)
        beater.stop()
        assert not ended.is_set()
    else:
        assert ended.wait(DEADLINE_S)
        assert len(master.beats) == beats and message in reasons[0]
    assert set(master.beats) == {Heartbeat(ProcessId("ROLLOUT", 1), 3)}
    assert {beat.oom_kills for beat in master.beats} == {count_oom_kills()}


NOTICED = """
import os, signal
from dlrover.python.rl.runtime.member.heartbeat import DepartureNotice

notice = DepartureNotice()
os.kill(os.getpid(), signal.SIGTERM)
print(notice.read(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still there")
"""


def test_first_sigterm_is_a_notice_and_the_second_the_end():
    ended = subprocess.run([sys.executable, "-c", NOTICED], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("it was sent SIGTERM\n", -signal.SIGTERM)


def test_file_is_a_notice_once_it_is_there(tmp_path):
    file, before = tmp_path / "leave", signal.getsignal(signal.SIGTERM)
    try:
        notice = heartbeat.DepartureNotice(str(file))
        assert notice.read() == ""
        file.touch()
        assert notice.read() == f"{file} exists"
        file.unlink()
        assert notice.read(), "the notice stays"
    finally:
        signal.signal(signal.SIGTERM, before)


FIRST, SECOND = ProcessId("ACTOR", 0), ProcessId("ACTOR", 1)
GONE = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "the actor is dead")
HUNG = Cause(CauseKind.HUNG, "ACTOR[0]", "no progress")


@pytest.mark.parametrize(
    ("texts", "count"),
    [(["oom_kill 3\noom_killed 9\n", "oom_kill 5\n"], 3), (["", "oom 1\noom_kill 5\n"], 5), (["", None], -1)],
)
def test_count_oom_kills_reads_the_first_file_with_one(tmp_path, texts, count):
    files = (tmp_path / "vmstat", tmp_path / "memory.events")
    for file, text in zip(files, texts, strict=True):
        if text is not None:
            file.write_text(text)
    assert count_oom_kills(files) == count


@pytest.mark.parametrize("host", ["here", "elsewhere"])
@pytest.mark.parametrize(
    ("cause", "before", "later", "kind"),
    [
        (GONE, 3, 4, CauseKind.OUT_OF_MEMORY),
        (GONE, 3, 3, CauseKind.PROCESS_DIED),
        (GONE, -1, 4, CauseKind.PROCESS_DIED),  # a process that has sent none
        (HUNG, 3, 4, CauseKind.HUNG),
    ],
)
def test_explain_a_death_compares_with_its_last_beat(tmp_path, host, cause, before, later, kind):
    process, kernel = Process("node", host=host), tmp_path / "vmstat"
    kills = heartbeat.OomKills("here", (kernel,))
    kills.note(FIRST, process, before)
    if host == "here":
        kernel.write_text(f"oom_kill {later}\n")
    else:
        kills.note(SECOND, process, later)
        kills.note(SECOND, Process("another", host="third"), 99)
    cause = kills.explain(FIRST, process, cause)
    assert (cause.kind, cause.who) == (kind, "ACTOR[0]")
    assert ("OOM killer" in cause.message) == (kind is CauseKind.OUT_OF_MEMORY)


READING = """
import sys
def reads_here():
    print('ready', flush=True)
    sys.exit(int(sys.stdin.readline()))
reads_here()
"""


@contextlib.contextmanager
def process(code):
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def test_process_shows_its_stack_and_continues_if_stopped():
    with process(READING) as child:
        assert "reads_here" in stacks_of(child.pid, deadline_s=10.0)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert "reads_here" in stacks_of(child.pid, deadline_s=10.0)
        child.send_signal(signal.SIGCONT)
        child.communicate("7\n", timeout=10)
        assert child.returncode == 7


def test_stacks_of_a_gone_process_has_the_reason():
    text = stacks_of(2**22 - 1)
    assert text.startswith("no Python stacks of process 4194303: ")
    assert "o such process" in text


def test_stacks_of_without_the_tool_asks_the_kernel(tmp_path):
    with process(READING) as child:
        wait_for(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S")
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
def test_stacks_of_with_a_failing_tool_keeps_its_deadline(tmp_path, script, why):
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    started_s = time.monotonic()
    text = stacks_of(os.getpid(), deadline_s=0.5, dumper=str(tool))
    assert time.monotonic() - started_s < 5.0
    assert why in text.splitlines()[0]
    assert "State: " in text


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


FIFTY_LINES = ":job_id:01000000\n:actor_name:A\n" + "".join(f"line {number}\n" for number in range(50))


@pytest.mark.parametrize(
    ("files", "tail"),
    [
        ({"01000000-4711.err": FIFTY_LINES, "01000000-711.err": "another process\n"}, "line 47\nline 48\nline 49"),
        ({"01000000-4711.err": "Traceback\nBoom\n", "01000000-4711.out": "one\ntwo\n"}, "two\nTraceback\nBoom"),
        ({"03000000-4711.err": "older\n", "02000000-4711.err": "newest\n"}, "newest"),
        ({}, ""),
    ],
    ids=["of its process", "and stdout", "newest process", "none"],
)
def test_ray_worker_log_tail_has_the_last_lines_without_marks(logs, files, tail):
    for age_s, (name, text) in enumerate(reversed(files.items())):
        file = logs / f"worker-ab12-{name}"
        file.write_text(text)
        os.utime(file, (1e9 - age_s,) * 2)
    assert heartbeat.ray_worker_log_tail(logs.parent, 4711, lines=3) == tail


def test_ray_worker_log_tail_reads_a_huge_log_from_its_end(logs):
    file = logs / "worker-ab12-01000000-4711.err"
    with file.open("wb") as log:
        log.truncate(1 << 33)
        log.seek(0, os.SEEK_END)
        log.write(b"\n\xff last words\n")
    assert heartbeat.ray_worker_log_tail(logs.parent, 4711, lines=1).endswith(" last words")
    file.unlink()
    file.mkdir()
    assert heartbeat.ray_worker_log_tail(logs.parent, 4711) == ""  # it cannot be read
