# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its owner, its description, and the commits that stay in it."""

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from dlrover.python.rl.common.errors import InvalidJob, JobConflict
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.spec import RUNS, CheckpointSpec
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
from dlrover.python.rl.runtime.run import folder as run_folder
from dlrover.python.rl.runtime.run.folder import FAILED, FINISHED, IN_PROCESS, begin, newest_owner, owner_of
from dlrover.python.rl.runtime.run.names import DESCRIPTION
from tests.support.disks import largest_file, system_calls

STEP = "step-00000010.e1"


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """A job that has not begun."""
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = load_job_text("{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A}}}", "job")
    return replace(job, job_dir=tmp_path / "out")


@pytest.fixture
def job(plain):
    return begin(plain)


def start(job, bound=True):
    return run_folder.claim(job, IN_PROCESS, bound=bound)


def resuming(job, **terms):
    return replace(job, checkpoint=replace(job.checkpoint, resume="latest", **terms))


def roots_of(job):
    return {"memory": memory_path(job.name, job.run), "checkpoints": job.job_dir / "checkpoints" / job.run}


@pytest.mark.parametrize(
    ("changes", "age_s", "alive"),
    [
        ({}, 1000, True),
        ({"state": FINISHED}, 0, False),
        ({"began": "1"}, 0, False),
        ({"pid": 2**30}, 0, False),
        ({"machine": "another"}, 1, True),
        ({"machine": "another"}, 1000, False),
        ({"pid": 0}, 1, True),
        ({"pid": 0}, 1000, False),
    ],
)
def test_owner_lives_as_its_process_or_its_lease_says(job, tmp_path, monkeypatch, changes, age_s, alive):
    owner, record = replace(owner_of(job, IN_PROCESS, True), lease_s=30.0, **changes), tmp_path / "owner.1.json"
    run_folder.write_shared(record, run_folder.encode_owner(owner), exclusive=True)
    touched_s = record.stat().st_mtime - age_s
    os.utime(record, (touched_s, touched_s))
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 86_400.0)  # the disk may be another machine's
    assert run_folder.is_alive(owner, record) == alive


def test_owner_on_a_silent_disk_lives_and_a_zombie_does_not(job, tmp_path):
    record = tmp_path / "owner.1.json"
    assert run_folder.is_alive(owner_of(job, IN_PROCESS, False), record)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    began = Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].split()[19]
    owner = replace(owner_of(job, IN_PROCESS, True), pid=child.pid, began=began)
    assert run_folder.is_alive(owner, record)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not run_folder.is_alive(owner, record)
    child.wait()


def test_newest_record_of_more_than_nine_counts(tmp_path):
    for number in (9, 10, 2):
        (tmp_path / f"owner.{number}.json").touch()
    assert run_folder.newest_record(tmp_path).name == "owner.10.json"


def test_of_two_starts_in_a_new_folder_one_is_refused(plain):
    for number in range(20):
        jobs = [begin(replace(plain, job_dir=plain.job_dir.with_name(f"out-{number}"))) for _ in range(2)]
        gate = Barrier(2)

        with ThreadPoolExecutor(2) as pool:
            starts = [pool.submit(lambda job, gate=gate: (gate.wait(20), start(job))[1], job) for job in jobs]
        (refusal,) = filter(None, (each.exception() for each in starts))
        (claimed,) = (each.result() for each in starts if not each.exception())
        assert isinstance(refusal, JobConflict)
        assert str(refusal) == f"{claimed.record.parent} is in use by {claimed.owner}"


@pytest.mark.parametrize(("bound", "is_refused"), [(True, True), (False, False)])
def test_bound_start_of_a_run_excludes_another(job, bound, is_refused):
    start(job, bound=bound)
    with pytest.raises(JobConflict, match="in use") if is_refused else nullcontext():
        start(job, bound=bound)


@pytest.mark.parametrize(
    ("file", "content", "is_result"),
    [("metrics.jsonl", "{}", True), ("summary.json", "{}", True), ("metrics.jsonl", "", False), ("notes", "x", False)],
)
def test_file_of_results_is_not_written_over(job, file, content, is_result):
    start(job).end(FAILED)
    (job.job_dir / file).write_text(content)
    assert ("has the results" in run_folder.conflict(replace(job, run="other"))) == is_result


def test_claim_shows_life_until_another_start_has_the_folder(job):
    claimed = start(job, bound=False)
    os.utime(claimed.record, (0, 0))
    claimed.beat()
    assert claimed.record.stat().st_mtime > 0
    another = claimed.record.with_name(f"owner.{claimed.number + 1}.json")
    run_folder.write_shared(another, run_folder.encode_owner(owner_of(job, IN_PROCESS, False)), exclusive=True)
    with pytest.raises(JobConflict, match="taken over"):
        claimed.beat()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_claim_whose_block_fails_has_failed(job, error):
    with pytest.raises(error), run_folder.held(start(job)):
        raise error
    assert newest_owner(job.job_dir).state == FAILED


@pytest.mark.parametrize("is_same_run", [True, False])
def test_overwriting_removes_commits_of_another_run_only(job, is_same_run):
    job = replace(job, overwrite=True)
    start(job, bound=False).end(FAILED)
    steps = [memory_path(job.name, job.run) / STEP, job.job_dir / "commits" / job.run]
    for step in steps:
        step.mkdir(parents=True)
    start(job if is_same_run else replace(job, run="other"), bound=False)
    assert [step.exists() for step in steps] == [is_same_run] * 2


@pytest.fixture
def runs(job, tmp_path, monkeypatch):
    """Make a run in a separate folder, by the number of its start."""
    monkeypatch.chdir(tmp_path)

    def make(number):
        run = f"{number:08x}"
        job_of_run = replace(job, run=run, job_dir=RUNS / job.name / f"20260101-00000{number}-{run}")
        return start(job_of_run)

    return make


def test_last_run_is_found_from_any_folder(runs, job, tmp_path, monkeypatch):
    started = runs(1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert (tmp_path / RUNS / job.name / run_folder.LATEST).resolve() == tmp_path / started.job.job_dir


@pytest.mark.parametrize(("keep", "left"), [(0, [0]), (1, [0, 3]), (2, [0, 2, 3]), (3, [0, 1, 2, 3])])
def test_newest_runs_and_a_living_one_keep_their_commits(runs, job, keep, left):
    for number in range(4):
        claimed = runs(number)
        (claimed.job.job_dir / "commits").mkdir()
        if number:
            claimed.end(FINISHED)
    later = replace(job, job_dir=RUNS, checkpoint=replace(job.checkpoint, keep_runs=keep))
    removed = {path.parent.name[14] for path in run_folder.superseded(later)}
    assert removed == {str(number) for number in range(4) if number not in left}


@pytest.mark.parametrize(
    ("command", "outcome", "resume"),
    [("steps=3", FAILED, "latest"), ("steps=4", FAILED, "never"), ("steps=3", FINISHED, "never")],
)
def test_repeated_command_resumes_an_unfinished_run(job, command, outcome, resume):
    job = replace(resuming(job), description_digest="steps=3")
    start(job).end(outcome)
    assert run_folder.repeated(replace(job, description_digest=command)).checkpoint.resume == resume


def test_run_can_be_resumed_once_a_step_is_committed(job):
    start(job)
    for root in roots_of(job).values():
        (root / "step-00000000.e1").mkdir(parents=True)
        (root / "LOCK").touch()
    assert not run_folder.has_commits(job.job_dir)
    for root in roots_of(job).values():
        (root / STEP).mkdir()
        assert run_folder.has_commits(job.job_dir)
        (root / STEP).rmdir()


@pytest.mark.parametrize(
    ("outcome", "command", "has_commit", "goes"),
    [
        (FINISHED, "more steps", True, True),
        (FINISHED, "more steps", False, False),
        (FINISHED, "steps", True, False),
        (FINISHED, "", True, False),
        (FAILED, "steps", False, True),
    ],
)
def test_another_command_continues_an_ended_run(plain, tmp_path, monkeypatch, outcome, command, has_commit, goes):
    monkeypatch.chdir(tmp_path)
    job = resuming(replace(plain, job_dir=RUNS, description_digest="steps"))
    ended = begin(job)
    start(ended).end(outcome)
    if has_commit:
        (roots_of(ended)["checkpoints"] / STEP).mkdir(parents=True)
    job_dir = run_folder.continued(replace(job, description_digest=command)).job_dir
    assert job_dir == (ended.job_dir.resolve() if goes else job.job_dir)


@pytest.mark.parametrize(
    ("outcome", "commits", "stays"),
    [(FAILED, False, True), (FAILED, True, False), (FINISHED, False, False), ("stopped", False, False)],
)
@pytest.mark.parametrize("place", ["memory", "checkpoints"])
@pytest.mark.parametrize("has_commits", [True, False])
def test_description_stays_if_the_next_start_fails_uncommitted(plain, outcome, commits, stays, place, has_commits):
    description = plain.job_dir / DESCRIPTION
    first_run = begin(resuming(plain))
    start(first_run).end(FINISHED)
    if has_commits:
        (roots_of(first_run)[place] / STEP).mkdir(parents=True)
    first = description.read_bytes()
    second_run = begin(resuming(plain, every=7))
    claimed = start(second_run)
    second = description.read_bytes()
    assert second != first
    (roots_of(second_run)[place] / f"step-0000000{int(commits)}.e1").mkdir(parents=True)
    claimed.end(outcome)
    assert description.read_bytes() == (first if stays and has_commits else second)


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_failed_claim_leaves_the_folder_as_it_was(plain, monkeypatch, earlier):
    class Refusing:
        def put(self, name):
            raise OSError(28, "No space left on device")

    def contents():
        files = {path: path.read_bytes() if path.is_file() else None for path in job.job_dir.rglob("*")}
        return newest_owner(job.job_dir), files

    job = replace(plain, overwrite=True)
    for _ in range(earlier):
        run = begin(job)
        start(run).end(FINISHED)
        (job.job_dir / "commits" / run.run / STEP).mkdir(parents=True)
    before = contents()
    other = begin(replace(job, checkpoint=replace(job.checkpoint, every=7)))
    with monkeypatch.context() as patch, pytest.raises(InvalidJob, match="No space left"):
        patch.setattr(run_folder, "files_of", lambda job: Refusing())
        start(other)
    assert contents() == before
    start(other)
    assert not list(job.job_dir.rglob("step-*"))
    with pytest.raises(JobConflict, match="in use"):
        start(begin(job))
    assert len(list(job.job_dir.glob("owner.*"))) == 1


@pytest.mark.parametrize(("key", "value"), [("overwrite", True), ("checkpoint", CheckpointSpec(resume="latest"))])
def test_only_an_overwritten_run_loses_its_spans(plain, key, value):
    start(begin(plain)).end(FAILED)
    (plain.job_dir / "spans").mkdir()
    start(begin(replace(plain, **{key: value})))
    assert (plain.job_dir / "spans").exists() is (key != "overwrite")


def test_claim_on_a_full_disk_names_the_folder_and_leaves_it(job):
    with largest_file(10), pytest.raises(InvalidJob, match=r"job_dir: .*/out cannot be written to: File too large"):
        start(job)
    assert not list(job.job_dir.iterdir())


def test_claim_syncs_record_and_job_before_older_record_goes(plain):
    job = replace(plain, job_dir=plain.job_dir / "new", overwrite=True)
    with system_calls("mkdir", "fsync", "link", "replace") as first:
        start(begin(job)).end(FINISHED)
    record, description = ["fsync", "link", "fsync"], ["fsync", "replace", "fsync"]
    assert [name for name in first if name != "mkdir"] == ["fsync", "fsync", *record, *description, *description]
    with system_calls("fsync", "link", "replace", "remove", "unlink") as second:
        start(begin(job))
    assert second == ["fsync", "link", "unlink", "fsync", *description, "unlink"]


@pytest.mark.parametrize("damage", ["empty", "half", "missing"])
@pytest.mark.parametrize("older", [False, True])
def test_newest_owner_of_a_damaged_record_has_no_outcome(plain, damage, older):
    job = begin(replace(plain, work_dir="/home/me"))
    record = start(job).record
    (job.job_dir / "commits" / job.run / STEP).mkdir(parents=True)
    content = record.read_bytes()
    if older:
        record = record.with_name("owner.2.json")
    record.unlink(missing_ok=True)
    if damage != "missing":
        record.write_bytes(content[: len(content) // 2 if damage == "half" else 0])
    owner = newest_owner(job.job_dir)
    if older and damage == "missing":  # the older one counts, and its process is this one
        assert run_folder.in_use(job.job_dir)
        return
    assert (owner.job, owner.state, owner.work_dir) == ("job", run_folder.RUNNING, "/home/me" if older else "")
    assert not run_folder.in_use(job.job_dir)
    number = start(begin(resuming(replace(job, run="")))).number
    assert number == (2 if damage != "missing" else 1) + older
    assert newest_owner(job.job_dir).state == run_folder.RUNNING


@pytest.mark.parametrize("description", ["", "name: [", "[]", None])
def test_newest_owner_of_an_undescribed_folder_is_none(tmp_path, description):
    (tmp_path / "owner.1.json").touch()
    if description is not None:
        (tmp_path / DESCRIPTION).write_text(description)
    assert newest_owner(tmp_path) is None
