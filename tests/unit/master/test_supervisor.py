# SPDX-License-Identifier: Apache-2.0
"""How often a supervisor begins again, and with what; the attempts are made up here."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import MasterLost
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.client import supervisor
from dlrover.python.rl.master.client.run import CheckedJob
from dlrover.python.rl.master.process.status import JobStatus
from dlrover.python.rl.runtime.checkpoint.store import Manifest
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.run.folder import FINISHED, newest_owner
from tests.support.toy_jobs import toy_job


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run a job whose attempts are ``commits``, a list with the step at which each is lost; gives the jobs of the
    attempts and what was told."""
    job = toy_job(tmp_path)
    job = replace(job, run="0", overwrite=True, restart=replace(job.restart, job_max_restart=2, backoff_s=0.0))
    checked, tried, told = CheckedJob(job, plan(job)[0], Inspection()), [], []

    def run(commits, interrupt=False):
        steps = iter(commits)

        def attempt(checked, address, again, report, announce, interrupts):
            tried.append((checked.job, again))
            if len(tried) > len(commits):
                return JobStatus(checked.job.name, Phase.FINISHED, 1, 0, "", None)
            if interrupt:
                signal.raise_signal(signal.SIGINT)
            raise supervisor.MasterLost("Ray was lost")

        monkeypatch.setattr(supervisor, "_attempt", attempt)
        monkeypatch.setattr(
            supervisor, "last_commit", lambda *_: (step := next(steps)) and Manifest(step, 1, "run", {}) or None
        )
        status = supervisor.run_supervised(checked, lambda report: None, told.append)
        return status, tried, told

    return run


def test_each_attempt_goes_on_in_the_folder_of_the_first_as_a_run_of_its_own(play):
    status, tried, told = play([0, 7])
    assert status.phase is Phase.FINISHED
    assert told == ["resuming from the beginning", "resuming after step 7"]
    (first, again), *others = tried
    assert first.overwrite and not again
    for job, again in others:
        assert again and job.job_dir == first.job_dir and not job.overwrite
        assert job.checkpoint.resume == "latest"
    assert len({job.run for job, _ in tried}) == 3


def test_commits_in_between_let_it_go_on_as_often_as_it_takes(play):
    assert play([1, 1, 2, 2, 3, 3])[0].phase is Phase.FINISHED


def test_without_one_it_ends_and_says_how_to_go_on(play):
    with pytest.raises(MasterLost, match="3 times in a row after step 1; to resume: dlrover-rl resume"):
        play([1, 1, 1])


def test_an_interrupted_job_does_not_begin_again(play):
    status, tried, told = play([1], interrupt=True)
    assert status.phase is Phase.STOPPED and len(tried) == 1 and not told


_CHILD = """#!{python}
import subprocess, sys
from multiprocessing.connection import Connection
from pathlib import Path
connection = Connection(int(sys.argv[-1]))
sys.path[:], _ = connection.recv()
connection.recv_bytes()
from dlrover.python.rl.common.errors import ClusterUnavailable
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.process.status import JobStatus
tries = Path({tries!r})
with tries.open("a") as file:
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(left.pid, file=file)
number = len(tries.read_text().splitlines())
if number == 2:
    connection.send(ClusterUnavailable("away"))
if number == 3:
    connection.send(JobStatus("toy", Phase.FINISHED, 1, 0, "", None))
"""


def test_a_job_ends_after_children_that_are_lost(tmp_path, monkeypatch):
    """One child ends without a word, one finds no cluster; each leaves a process in a separate session."""
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = toy_job(tmp_path / "out")
    job = replace(job, run="0", restart=replace(job.restart, job_max_restart=2, backoff_s=0.0))
    checked, child, tries = CheckedJob(job, plan(job)[0], Inspection()), tmp_path / "child", tmp_path / "tries"
    child.write_text(_CHILD.format(python=sys.executable, tries=str(tries)))
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    told = []
    status = supervisor.run_supervised(checked, lambda report: None, told.append)
    assert status.phase is Phase.FINISHED and told == ["resuming from the beginning"] * 2
    pids = tries.read_text().split()
    assert len(pids) == 3 and not [pid for pid in pids if is_running(pid)]
    assert newest_owner(job.job_dir).state == FINISHED


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_what_a_child_prints_is_read_to_its_end_though_nothing_takes_it_any_more(monkeypatch):
    """As behind ``| head``: a child whose pipe is full would wait for ever."""
    taken = []

    class Closed:
        def write(self, line):
            taken.append(line)
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    child = subprocess.Popen(
        [sys.executable, "-c", "print('word ' * 50_000)\nprint('end')"], stdout=subprocess.PIPE, text=True
    )
    pump = supervisor._pump(child.stdout, "stdout")
    assert child.wait(60) == 0
    pump.join(60)
    assert taken[-1] == "end\n" and child.stdout.closed
