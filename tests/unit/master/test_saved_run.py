# SPDX-License-Identifier: Apache-2.0
"""What a run that has not finished tells its user."""

import errno
from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import InvalidJob, JournalCorrupt
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.events import Cause, CauseKind, Submitted
from dlrover.python.rl.master.client import jobs
from dlrover.python.rl.master.client.jobs import SavedRuns, read_history
from dlrover.python.rl.master.client.resume import describe_start, find_saved_run, how_to_go_on, saved_job
from dlrover.python.rl.master.process.brain import JOURNAL, Brain
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path, memory_root
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore
from dlrover.python.rl.runtime.run.folder import FAILED, IN_PROCESS, begin, claim

JOB = "{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A}}}"


@pytest.mark.parametrize(
    ("committed", "said"),
    [
        ("", "no step was committed; to begin again: "),
        ("elsewhere", "to resume, on a machine that has its files: "),
        ("memory", "its commits are only in the memory of this machine, and could not be saved to "),
        ("copies", "resume after its last committed step: "),
    ],
)
def test_a_run_that_has_not_finished_says_how_it_goes_on(tmp_path, monkeypatch, committed, said):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = begin(replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out"))
    claim(job, IN_PROCESS, bound=True).end(FAILED)
    copies = CheckpointStore(job.job_dir / "checkpoints" / job.run, job.run, durable=True)
    if committed == "memory":
        (memory_path(job.name, job.run) / "step-00000010.e1").mkdir(parents=True)

        def full(root):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("dlrover.python.rl.runtime.checkpoint.node_memory._save", full)
    if committed == "elsewhere":
        assert how_to_go_on(job, tmp_path / "not here").startswith(said)
    if committed == "copies":
        copies.root.mkdir(parents=True)
        own = copies.write(10, 1, "trainer.state", {"role": "trainer", "step": 10}, {})
        copies.commit(10, 1, {"trainer": own})
    text = how_to_go_on(job, job.job_dir, step=10 if committed == "elsewhere" else 0)
    assert text.startswith(said)
    assert text.endswith(f"dlrover-rl resume {job.job_dir}")
    for_users = how_to_go_on(job, job.job_dir, cause=Cause(CauseKind.USER_ERROR, "trainer", "a row is too long"))
    assert for_users.startswith("once its cause is fixed, resume after" if committed == "copies" else "")
    assert bool(for_users) == (committed == "copies")


@pytest.mark.parametrize("content", [b"", b'{\n "job": "jo'])
def test_find_saved_run_with_damaged_record_resumes(tmp_path, monkeypatch, content):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = begin(replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out"))
    record = claim(job, IN_PROCESS, bound=True).record
    commits = CheckpointStore(job.job_dir / "commits" / job.run, job.run, durable=True)
    commits.claim(1)
    own = commits.write(10, 1, "trainer.state", {"role": "trainer", "step": 10}, {})
    commits.commit(10, 1, {"trainer": own})
    brain = Brain(FileStateStore(job.job_dir / JOURNAL))
    brain.handle(Submitted("job", {}, job.run, 3, 3))
    brain.store.close()
    record.write_bytes(content)
    run = find_saved_run(str(job.job_dir))
    resumed = saved_job(run)
    assert (resumed.name, resumed.checkpoint.resume) == ("job", "latest")
    assert describe_start(run, resumed, "out") == f"job: resuming in {job.job_dir}, after step 10"
    assert SavedRuns().get(str(job.job_dir)).phase == "lost"


@pytest.mark.parametrize("name", ["owner.1.json", "job.yaml", "journal.jsonl", "metrics.jsonl", "cluster"])
def test_link_in_a_run_folder_is_not_read(tmp_path, name):
    job = begin(replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out"))
    claim(job, IN_PROCESS, bound=True).end(FAILED)
    folder, outside = job.job_dir, tmp_path / "outside"
    if name in ("metrics.jsonl", "cluster", "journal.jsonl"):
        (folder / name).write_text('{"step": 7}\n')
    read = {
        "owner.1.json": lambda: find_saved_run(str(folder)).owner,
        "job.yaml": lambda: saved_job(find_saved_run(str(folder))),
        "journal.jsonl": lambda: read_history(folder),
        "metrics.jsonl": lambda: jobs._last_metrics(folder)["step"],
        "cluster": lambda: jobs.address_in(folder) or {}["address"],
    }[name]
    if name != "journal.jsonl":
        assert read()
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises((InvalidJob, JournalCorrupt, KeyError)) as refused:
        read()
    assert name != "journal.jsonl" or "symbolic links" in str(refused.value)


def test_how_to_go_on_with_a_dead_disk_names_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = begin(replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out"))
    claim(job, IN_PROCESS, bound=True).end(FAILED)
    folder = job.job_dir / "checkpoints" / job.run / "step-00000010.e1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").symlink_to("/proc/self/mem")  # EIO
    again = f"once it can, resume: dlrover-rl resume {job.job_dir}"
    dead = f"{folder / 'manifest.json'} cannot be read (Input/output error): "
    assert how_to_go_on(job, job.job_dir) == f"{dead}{again}"
    root = memory_root(job.name, job.run, folder.parent)
    memory = CheckpointStore(root, job.run, durable=False)
    own = memory.write(11, 1, "trainer.state", {"role": "trainer", "step": 11}, {})
    memory.commit(11, 1, {"trainer": own})
    assert how_to_go_on(job, job.job_dir) == f"{dead}step 11 is in {root}, until this machine restarts; {again}"
