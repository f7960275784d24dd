# SPDX-License-Identifier: Apache-2.0
"""Saved runs: how each is resumed, from where and by whom; the attempts of the supervisor are made up."""

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import InvalidJob, JournalCorrupt, MasterLost
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.events import Cause, CauseKind, Submitted
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.client import jobs, resume, supervisor
from dlrover.python.rl.master.client.jobs import SavedRuns, read_history
from dlrover.python.rl.master.client.resume import find_saved_run, how_to_go_on, saved_job
from dlrover.python.rl.master.client.run import CheckedJob
from dlrover.python.rl.master.process.brain import JOURNAL, Brain
from dlrover.python.rl.master.process.status import JobStatus
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path, memory_root
from dlrover.python.rl.runtime.checkpoint.runs import CODE
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore, Manifest
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.run import folder as run_folder
from tests.support.commands import is_alive
from tests.support.toy_jobs import toy_job

JOB = "{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A}}, config: {model: m}}"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A job whose run has begun in ``out``."""
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    monkeypatch.chdir(tmp_path)
    return run_folder.begin(replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out"))


@pytest.fixture
def ended(started):
    """The job ``started``, failed."""
    run_folder.claim(started, run_folder.IN_PROCESS, bound=True).end(run_folder.FAILED)
    return started


def commit(store, step):
    own = store.write(step, 1, "trainer.state", {"role": "trainer", "step": step}, {})
    store.commit(step, 1, {"trainer": own})


@pytest.mark.parametrize(
    ("committed", "beginning"),
    [
        ("", "no step was committed; to begin again: "),
        ("elsewhere", "to resume, on a machine that has its files: "),
        ("memory", "its commits are only in the memory of this machine, and could not be saved to "),
        ("copies", "resume after its last committed step: "),
    ],
)
def test_advice_names_the_last_commit_and_the_command(ended, monkeypatch, committed, beginning):
    if committed == "memory":
        (memory_path(ended.name, ended.run) / "step-00000010.e1").mkdir(parents=True)

        def full(root):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("dlrover.python.rl.runtime.checkpoint.node_memory._save", full)
    if committed == "elsewhere":
        assert how_to_go_on(ended, ended.job_dir / "not here").startswith(beginning)
    if committed == "copies":
        copies = CheckpointStore(ended.job_dir / "checkpoints" / ended.run, ended.run, durable=True)
        copies.root.mkdir(parents=True)
        commit(copies, 10)
    line = how_to_go_on(ended, ended.job_dir, step=10 if committed == "elsewhere" else 0)
    assert line.startswith(beginning)
    assert line.endswith(f"dlrover-rl resume {ended.job_dir}")
    line = how_to_go_on(ended, ended.job_dir, cause=Cause(CauseKind.USER_ERROR, "trainer", "a row is too long"))
    assert line.startswith("once its cause is fixed, resume after" if committed == "copies" else "")
    assert bool(line) == (committed == "copies")


@pytest.mark.parametrize("content", [b"", b'{\n "job": "jo'])
def test_find_saved_run_with_damaged_record_resumes(started, content):
    record = run_folder.claim(started, run_folder.IN_PROCESS, bound=True).record
    commits = CheckpointStore(started.job_dir / "commits" / started.run, started.run, durable=True)
    commits.claim(1)
    commit(commits, 10)
    brain = Brain(FileStateStore(started.job_dir / JOURNAL))
    brain.handle(Submitted("job", {}, started.run, 3, 3))
    brain.store.close()
    record.write_bytes(content)
    run = find_saved_run(str(started.job_dir))
    resumed = saved_job(run)
    assert (resumed.name, resumed.checkpoint.resume) == ("job", "latest")
    assert resume.describe_start(run, resumed, "out") == f"job: resuming in {started.job_dir}, after step 10"
    assert SavedRuns().get(str(started.job_dir)).phase == "lost"


@pytest.mark.parametrize("name", ["owner.1.json", "job.yaml", "journal.jsonl", "metrics.jsonl", "cluster"])
def test_link_in_a_run_folder_is_not_read(ended, name):
    folder, outside = ended.job_dir, ended.job_dir.with_name("outside")
    if name in ("metrics.jsonl", "cluster", "journal.jsonl"):
        (folder / name).write_text('{"step": 7}\n')
    read = {
        "owner.1.json": lambda: find_saved_run(str(folder)).owner,
        "job.yaml": lambda: saved_job(find_saved_run(str(folder))),
        "journal.jsonl": lambda: read_history(folder),
        "metrics.jsonl": lambda: jobs._last_metrics(folder)[0]["step"],
        "cluster": lambda: jobs.address_in(folder) or {}["address"],
    }[name]
    if name != "journal.jsonl":
        assert read()
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises((InvalidJob, JournalCorrupt, KeyError)) as refused:
        read()
    assert name != "journal.jsonl" or "symbolic links" in str(refused.value)


def test_advice_with_a_dead_disk_names_memory(ended):
    folder = ended.job_dir / "checkpoints" / ended.run / "step-00000010.e1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").symlink_to("/proc/self/mem")  # EIO
    again = f"once it can, resume: dlrover-rl resume {ended.job_dir}"
    dead = f"{folder / 'manifest.json'} cannot be read (Input/output error): "
    assert how_to_go_on(ended, ended.job_dir) == f"{dead}{again}"
    root = memory_root(ended.name, ended.run, folder.parent)
    commit(CheckpointStore(root, ended.run, durable=False), 11)
    assert how_to_go_on(ended, ended.job_dir) == f"{dead}step 11 is in {root}, until this machine restarts; {again}"


# -- the run to resume ------------------------------------------------------------------------------------------------


def test_find_saved_run_of_a_name_is_its_last_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for state in (run_folder.FINISHED, run_folder.FAILED):
        job = run_folder.begin(load_job_text(JOB, "job"))
        run_folder.claim(job, run_folder.IN_PROCESS, bound=True).end(state)
    run = find_saved_run("job")
    assert run.folder == job.job_dir.resolve() and run.owner.run == job.run
    run_folder.claim(run_folder.begin(load_job_text(JOB, "job")), run_folder.IN_PROCESS, bound=True)
    assert run.folder.resolve() == job.job_dir.resolve()


@pytest.mark.parametrize("override", ["job_dir=x", "+job_dir=x", "name=y", "++name=y"])
def test_saved_job_keeps_its_folder_and_name(ended, override):
    with pytest.raises(InvalidJob, match="cannot be changed"):
        saved_job(find_saved_run("out"), [override])


def test_evaluation_overrides_prefer_the_given_model(ended):
    changes = resume.evaluation_overrides(JOB, ended.job_dir, True, ["config.model=other"])
    assert [change for change in changes if "config.model=" in change][-1] == "config.model=other"


@pytest.mark.parametrize("length", [1, 58, 59, 63])
def test_an_evaluation_has_a_name_of_a_job(length):
    name = resume.evaluation_name("a" * length)
    assert len(name) <= 63 and name.endswith("a-eval")


@pytest.mark.parametrize(
    ("commit", "line"),
    [
        (None, ", from the beginning: no step was committed"),
        (Manifest(3, 1, "run", {}), ", after step 3"),
        (
            Manifest(3, 1, "run", {}, {CODE: {"modules": {"rewards": "aa"}, "versions": {}}}),
            ", after step 3; changed since: rewards, ",
        ),
    ],
)
def test_describe_start_names_the_step_and_changed_code(ended, monkeypatch, commit, line):
    monkeypatch.setattr(resume, "last_commit", lambda *_: commit)
    start = resume.describe_start(find_saved_run("out"), ended, "job")
    assert start.startswith(f"job: resuming in {ended.job_dir}{line}")


def test_finished_run_without_commits_is_not_resumed(ended):
    run = find_saved_run("out")
    with pytest.raises(InvalidJob, match="there is nothing to resume"):
        resume.describe_start(replace(run, owner=replace(run.owner, state=run_folder.FINISHED)), ended, "job")


@pytest.mark.parametrize(("machine", "waits"), [("another", True), (None, False)])
def test_an_owner_elsewhere_is_waited_for_as_long_as_its_lease(tmp_path, monkeypatch, machine, waits):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = run_folder.begin(replace(load_job_text(JOB, "job", ["checkpoint.resume=latest"]), job_dir=tmp_path / "out"))
    claimed = run_folder.claim(job, run_folder.IN_PROCESS, bound=True)
    owner = replace(claimed.owner, lease_s=30.0, machine=machine or claimed.owner.machine)
    claimed.record.write_bytes(run_folder.encode_owner(owner))
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        touched_s = claimed.record.stat().st_mtime - seconds
        os.utime(claimed.record, (touched_s, touched_s))

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    resume.wait_for_lost_owner(job)
    assert (29.0 < sum(slept) < 31.0 and not run_folder.in_use(job.job_dir)) if waits else not slept


# -- the supervisor ---------------------------------------------------------------------------------------------------


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run a job that is lost after each step of ``commits``; gives its status, its attempts and the lines announced."""
    job = toy_job(tmp_path)
    job = replace(job, run="0", overwrite=True, restart=replace(job.restart, job_max_restart=2, backoff_s=0.0))
    checked, attempts, lines = CheckedJob(job, plan(job)[0], Inspection()), [], []

    def run(commits, interrupt=False):
        steps = iter(commits)

        def attempt(checked, address, again, report, announce, interrupts):
            attempts.append((checked.job, again))
            if len(attempts) > len(commits):
                return JobStatus(checked.job.name, Phase.FINISHED, 1, 0, "", None)
            if interrupt:
                signal.raise_signal(signal.SIGINT)
            raise supervisor.MasterLost("Ray was lost")

        monkeypatch.setattr(supervisor, "_attempt", attempt)
        monkeypatch.setattr(
            supervisor, "last_commit", lambda *_: (step := next(steps)) and Manifest(step, 1, "run", {}) or None
        )
        status = supervisor.run_supervised(checked, lambda report: None, lines.append)
        return status, attempts, lines

    return run


def test_each_attempt_is_a_new_run_in_the_same_folder(play):
    status, attempts, lines = play([0, 7])
    assert status.phase is Phase.FINISHED
    assert lines == ["resuming from the beginning", "resuming after step 7"]
    (first, is_again), *later = attempts
    assert first.overwrite and not is_again
    for job, is_again in later:
        assert is_again and job.job_dir == first.job_dir and not job.overwrite
        assert job.checkpoint.resume == "latest"
    assert len({job.run for job, _ in attempts}) == 3


def test_attempts_with_commits_between_are_not_limited(play):
    assert play([1, 1, 2, 2, 3, 3])[0].phase is Phase.FINISHED


def test_attempts_without_commits_end_with_the_resume_command(play):
    with pytest.raises(MasterLost, match="3 times in a row after step 1; to resume: dlrover-rl resume"):
        play([1, 1, 1])


def test_interrupted_job_is_not_tried_again(play):
    status, attempts, lines = play([1], interrupt=True)
    assert status.phase is Phase.STOPPED and len(attempts) == 1 and not lines


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


def test_supervisor_survives_lost_children(tmp_path, monkeypatch):
    """One child ends without a word, one finds no cluster; each leaves a process in a separate session."""
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = toy_job(tmp_path / "out")
    job = replace(job, run="0", restart=replace(job.restart, job_max_restart=2, backoff_s=0.0))
    checked, child, tries = CheckedJob(job, plan(job)[0], Inspection()), tmp_path / "child", tmp_path / "tries"
    child.write_text(_CHILD.format(python=sys.executable, tries=str(tries)))
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    lines = []
    status = supervisor.run_supervised(checked, lambda report: None, lines.append)
    assert status.phase is Phase.FINISHED and lines == ["resuming from the beginning"] * 2
    pids = tries.read_text().split()
    assert len(pids) == 3 and not [pid for pid in pids if is_alive(int(pid))]
    assert run_folder.newest_owner(job.job_dir).state == run_folder.FINISHED


def test_pump_reads_on_after_its_output_was_closed(monkeypatch):
    """A child whose pipe is full would wait for ever."""
    lines = []

    class Closed:
        def write(self, line):
            lines.append(line)
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    program = "print('word ' * 50_000)\nprint('end')"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pump = supervisor._pump(child.stdout, "stdout")
    assert child.wait(60) == 0
    pump.join(60)
    assert lines[-1] == "end\n" and child.stdout.closed
