# SPDX-License-Identifier: Apache-2.0
"""What a run's folder says of it."""

from dataclasses import replace

from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
from dlrover.python.rl.runtime.earlier_run import has_commits
from dlrover.python.rl.runtime.run_folder import IN_PROCESS, begin, claim

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
