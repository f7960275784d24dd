# SPDX-License-Identifier: Apache-2.0
"""What a run's folder says of it."""

from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import InvalidJob, JobConflict
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
from dlrover.python.rl.runtime.run import folder as run_folder
from dlrover.python.rl.runtime.run.folder import (
    DESCRIPTION,
    FAILED,
    FINISHED,
    IN_PROCESS,
    RUNNING,
    begin,
    claim,
    continued,
    has_commits,
    in_use,
    newest_owner,
)
from tests.support.disks import largest_file, system_calls

JOB = "{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A}}}"


def test_a_run_has_something_to_go_on_with_once_a_step_is_committed(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = begin(replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out"))
    claim(job, IN_PROCESS, bound=True)
    memory, copies = memory_path(job.name, job.run), job.job_dir / "checkpoints" / job.run
    for root in (memory, copies):
        root.mkdir(parents=True)
        (root / "LOCK").touch()
        (root / "step-00000000.e1").mkdir()
    assert not has_commits(job.job_dir)
    for root in (memory, copies):
        step = root / "step-00000010.e1"
        step.mkdir()
        assert has_commits(job.job_dir)
        step.rmdir()


@pytest.mark.parametrize(
    ("outcome", "given", "has_commit", "goes_on"),
    [
        (FINISHED, "more steps", True, True),
        (FINISHED, "more steps", False, False),
        (FINISHED, "steps", True, False),
        (FINISHED, "", True, False),
        (FAILED, "steps", False, True),
    ],
)
def test_after_the_end_of_a_run_another_command_goes_on_with_it_and_the_same_one_does_not(
    tmp_path, monkeypatch, outcome, given, has_commit, goes_on
):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = replace(load_job_text(JOB, "job", ["checkpoint.resume=latest"]), description_digest="steps")
    monkeypatch.chdir(tmp_path)
    ended = begin(job)
    claim(ended, IN_PROCESS, bound=True).end(outcome)
    if has_commit:
        (ended.job_dir / "checkpoints" / ended.run / "step-00000010.e1").mkdir(parents=True)
    found = continued(replace(job, description_digest=given))
    assert found.job_dir == (ended.job_dir.resolve() if goes_on else job.job_dir)


@pytest.mark.parametrize(
    ("outcome", "commits", "stays"),
    [
        (FAILED, False, True),
        (FAILED, True, False),
        (FINISHED, False, False),
        ("stopped", False, False),
    ],
)
@pytest.mark.parametrize("where", ["memory", "checkpoints"])
@pytest.mark.parametrize("is_begun", [True, False])
def test_what_a_run_was_begun_with_stays_if_another_one_fails_before_it_has_committed(
    tmp_path, monkeypatch, outcome, commits, stays, where, is_begun
):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out")
    job = replace(job, checkpoint=replace(job.checkpoint, resume="latest"))
    begun = begin(job)
    claim(begun, IN_PROCESS, bound=True).end(FINISHED)
    if is_begun:
        root = memory_path(job.name, begun.run) if where == "memory" else job.job_dir / "checkpoints" / begun.run
        (root / "step-00000010.e1").mkdir(parents=True)
    first = (job.job_dir / DESCRIPTION).read_bytes()
    again = begin(replace(job, checkpoint=replace(job.checkpoint, every=7)))
    claimed = claim(again, IN_PROCESS, bound=True)
    second = (job.job_dir / DESCRIPTION).read_bytes()
    assert second != first
    root = memory_path(job.name, again.run) if where == "memory" else job.job_dir / "checkpoints" / again.run
    (root / f"step-0000000{int(commits)}.e1").mkdir(parents=True)
    claimed.end(outcome)
    assert (job.job_dir / DESCRIPTION).read_bytes() == (first if stays and is_begun else second)


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_a_claim_that_fails_half_way_leaves_the_folder_as_it_was(tmp_path, monkeypatch, earlier):
    class Refusing:
        def put(self, name):
            raise OSError(28, "No space left on device")

    job = replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out", overwrite=True)
    for _ in range(earlier):
        begun = begin(job)
        claim(begun, IN_PROCESS, bound=True).end(FINISHED)
        (job.job_dir / "commits" / begun.run / "step-00000010.e1").mkdir(parents=True)
    before = newest_owner(job.job_dir), sorted(job.job_dir.rglob("*"))
    described = (job.job_dir / DESCRIPTION).read_bytes() if earlier else b""
    other = begin(replace(job, checkpoint=replace(job.checkpoint, every=7)))
    with monkeypatch.context() as patch, pytest.raises(InvalidJob, match="No space left"):
        patch.setattr(run_folder, "files_of", lambda job: Refusing())
        claim(other, IN_PROCESS, bound=True)
    assert (newest_owner(job.job_dir), sorted(job.job_dir.rglob("*"))) == before
    assert not earlier or (job.job_dir / DESCRIPTION).read_bytes() == described
    claim(other, IN_PROCESS, bound=True)
    assert not [path for path in job.job_dir.rglob("step-*")]
    with pytest.raises(JobConflict, match="in use"):
        claim(begin(job), IN_PROCESS, bound=True)
    assert len(list(job.job_dir.glob("owner.*"))) == 1


def test_a_folder_on_a_full_disk_is_named_and_left_as_it_was(tmp_path):
    job = begin(replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out"))
    with largest_file(10), pytest.raises(InvalidJob, match=r"job_dir: .*/out cannot be written to: File too large"):
        claim(job, IN_PROCESS, bound=True)
    assert not list((tmp_path / "out").iterdir())


def test_claim_syncs_record_and_job_before_older_record_goes(tmp_path):
    job = replace(load_job_text(JOB, "job"), job_dir=tmp_path / "new" / "out", overwrite=True)
    with system_calls("mkdir", "fsync", "link", "replace") as first:
        claim(begin(job), IN_PROCESS, bound=True).end(FINISHED)
    record, description = ["fsync", "link", "fsync"], ["fsync", "replace", "fsync"]
    assert [name for name in first if name != "mkdir"] == ["fsync", "fsync", *record, *description, *description]
    with system_calls("fsync", "link", "replace", "remove", "unlink") as second:
        claim(begin(job), IN_PROCESS, bound=True)
    assert second == ["fsync", "link", "unlink", "fsync", *description, "unlink"]


@pytest.mark.parametrize("damage", ["empty", "half", "missing"])
@pytest.mark.parametrize("older", [False, True])
def test_newest_owner_of_a_damaged_record_has_no_outcome(tmp_path, damage, older):
    job = begin(replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out", work_dir="/home/me"))
    record = claim(job, IN_PROCESS, bound=True).record
    (job.job_dir / "commits" / job.run / "step-00000010.e1").mkdir(parents=True)
    content = record.read_bytes()
    if older:
        record = record.with_name("owner.2.json")
    record.unlink(missing_ok=True)
    if damage != "missing":
        record.write_bytes(content[: len(content) // 2 if damage == "half" else 0])
    owner = newest_owner(job.job_dir)
    if older and damage == "missing":  # the older one counts, and its process is this one
        assert in_use(job.job_dir)
        return
    assert (owner.job, owner.state, owner.work_dir) == ("job", RUNNING, "/home/me" if older else "")
    assert not in_use(job.job_dir)
    again = replace(job, run="", checkpoint=replace(job.checkpoint, resume="latest"))
    assert claim(begin(again), IN_PROCESS, bound=True).number == (2 if damage != "missing" else 1) + older
    assert newest_owner(job.job_dir).state == RUNNING


@pytest.mark.parametrize("description", ["", "name: [", "[]", None])
def test_newest_owner_of_an_undescribed_folder_is_none(tmp_path, description):
    (tmp_path / "owner.1.json").touch()
    if description is not None:
        (tmp_path / DESCRIPTION).write_text(description)
    assert newest_owner(tmp_path) is None
