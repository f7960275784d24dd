# SPDX-License-Identifier: Apache-2.0
"""The master's hold on its run's folder."""

import asyncio
import errno
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dlrover.python.rl.common.errors import InvalidJob, JobConflict
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.master.process import rl_master
from dlrover.python.rl.master.process.rl_master import MasterRun
from dlrover.python.rl.runtime.run.folder import in_use

JOB = """
trainer: {module: toys, class: Loop}
workload: {actor: {module: toys, class: Policy}}
"""


def test_a_folder_that_fails_does_not_keep_the_master_from_ending(monkeypatch, caplog):
    def fail(folder):
        raise OSError(errno.EIO, "simulated", str(folder))

    monkeypatch.setattr(rl_master, "copy_all_rests", fail)
    held, ended = MasterRun(load_job_text(JOB, "job"), claims=False), []
    held._claim = SimpleNamespace(end=ended.append)
    held.leave("failed")
    assert ended == ["failed"]
    assert "the end of job could not be recorded in its folder" in caplog.text


def test_a_folder_that_cannot_be_used_is_named_before_the_job_begins_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_master, "current_address", lambda: "127.0.0.1:1")
    held = MasterRun(replace(load_job_text(JOB, "job"), run="1", job_dir=tmp_path), claims=True)

    def fail(job):
        assert in_use(tmp_path)
        raise OSError(errno.EACCES, "simulated")

    monkeypatch.setattr(rl_master.brain, "fresh_journal", fail)
    with pytest.raises(InvalidJob, match="job_dir: the master cannot use it: .*simulated"):
        asyncio.run(held.begin())
    assert not in_use(tmp_path)
    assert (tmp_path / "cluster").read_text() == "127.0.0.1:1"


@pytest.mark.parametrize(("owner", "leaves"), [("1", True), ("2", False)])
def test_hold_of_a_run_taken_by_its_own_next_master_leaves(tmp_path, monkeypatch, owner, leaves):
    def refuse():
        raise JobConflict("another process has the folder")

    departures = []
    monkeypatch.setattr(rl_master.run_folder, "BEAT_S", 0.0)
    monkeypatch.setattr(rl_master, "leave", departures.append)
    monkeypatch.setattr(rl_master.run_folder, "newest_owner", lambda folder: SimpleNamespace(run=owner))
    hold = MasterRun(replace(load_job_text(JOB, "job"), run="1", job_dir=tmp_path), claims=True)
    hold._claim = SimpleNamespace(beat=refuse)
    with pytest.raises(JobConflict):
        asyncio.run(hold.hold(lambda: False))
    assert bool(departures) is leaves
