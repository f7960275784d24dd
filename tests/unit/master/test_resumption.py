# SPDX-License-Identifier: Apache-2.0
"""Which run a name stands for, what it continues with, and when."""

import os
import time
from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.master.client import resume
from dlrover.python.rl.master.client.resume import (
    describe_start,
    evaluation_name,
    evaluation_overrides,
    find_saved_run,
    saved_job,
    wait_for_lost_owner,
)
from dlrover.python.rl.runtime.checkpoint.runs import CODE
from dlrover.python.rl.runtime.checkpoint.store import Manifest
from dlrover.python.rl.runtime.run.folder import FAILED, FINISHED, IN_PROCESS, begin, claim, encode_owner, in_use

JOB = "{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A}}, config: {model: m}}"


@pytest.fixture
def ended(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    monkeypatch.chdir(tmp_path)
    job = begin(load_job_text(JOB, "job"))
    claim(job, IN_PROCESS, bound=True).end(FAILED)
    return job


def test_a_name_stands_for_the_folder_of_its_last_run(ended):
    run = find_saved_run("job")
    assert run.folder == ended.job_dir.resolve() and run.owner.run == ended.run
    claim(begin(load_job_text(JOB, "job")), IN_PROCESS, bound=True)
    assert run.folder.resolve() == ended.job_dir.resolve()


@pytest.mark.parametrize("override", ["job_dir=x", "+job_dir=x", "name=y", "++name=y"])
def test_a_run_goes_on_in_its_folder_under_its_name(ended, override):
    with pytest.raises(InvalidJob, match="cannot be changed"):
        saved_job(find_saved_run("job"), [override])


def test_the_model_that_is_named_is_evaluated(ended):
    changes = evaluation_overrides(JOB, ended.job_dir, True, ["config.model=other"])
    assert [change for change in changes if "config.model=" in change][-1] == "config.model=other"


@pytest.mark.parametrize("length", [1, 58, 59, 63])
def test_an_evaluation_has_a_name_of_a_job(length):
    name = evaluation_name("a" * length)
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
    start = describe_start(find_saved_run("job"), ended, "job")
    assert start.startswith(f"job: resuming in {ended.job_dir}{line}")


def test_without_commits_a_finished_run_cannot_go_on(ended):
    run = find_saved_run("job")
    with pytest.raises(InvalidJob, match="there is nothing to resume"):
        describe_start(replace(run, owner=replace(run.owner, state=FINISHED)), ended, "job")


@pytest.mark.parametrize(("machine", "waits"), [("another", True), (None, False)])
def test_an_owner_elsewhere_is_waited_for_as_long_as_its_lease(tmp_path, monkeypatch, machine, waits):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = begin(replace(load_job_text(JOB, "job", ["checkpoint.resume=latest"]), job_dir=tmp_path / "out"))
    claimed = claim(job, IN_PROCESS, bound=True)
    owner = replace(claimed.owner, lease_s=30.0, machine=machine or claimed.owner.machine)
    claimed.record.write_bytes(encode_owner(owner))
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        touched_s = claimed.record.stat().st_mtime - seconds
        os.utime(claimed.record, (touched_s, touched_s))

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    wait_for_lost_owner(job)
    assert (29.0 < sum(slept) < 31.0 and not in_use(job.job_dir)) if waits else not slept
