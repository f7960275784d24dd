# SPDX-License-Identifier: Apache-2.0
"""What a run that has not finished tells its user."""

import errno
from dataclasses import replace

import pytest

from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.events import Cause, CauseKind
from dlrover.python.rl.master.saved_run import how_to_go_on
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path, memory_root
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore
from dlrover.python.rl.runtime.owner import FAILED, IN_PROCESS
from dlrover.python.rl.runtime.run_folder import begin, claim

JOB = "{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A}}}"


@pytest.mark.parametrize(
    ("committed", "said"),
    [
        ("", "no step was committed; to begin again: "),
        ("elsewhere", "to go on, where its files are: "),
        ("memory", "its commits are in the memory of this machine only, and could not be saved to "),
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
        copies.commit(10, 1, {"trainer": own}, {}, {})
    text = how_to_go_on(job, job.job_dir, step=10 if committed == "elsewhere" else 0)
    assert text.startswith(said)
    assert text.endswith(f"dlrover-rl resume {job.job_dir}")
    for_users = how_to_go_on(job, job.job_dir, cause=Cause(CauseKind.USER_ERROR, "trainer", "a row is too long"))
    assert for_users.startswith("once its cause is fixed, resume after" if committed == "copies" else "")
    assert bool(for_users) == (committed == "copies")


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
