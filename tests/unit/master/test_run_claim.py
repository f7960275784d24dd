# SPDX-License-Identifier: Apache-2.0
"""The master's hold on its run's folder."""

import errno

from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.master.process import run_claim
from dlrover.python.rl.master.process.run_claim import RunClaim

JOB = """
trainer: {module: toys, class: Loop}
workload: {actor: {module: toys, class: Policy}}
"""


def test_a_folder_that_fails_does_not_keep_the_master_from_ending(monkeypatch, caplog):
    def fail(folder):
        raise OSError(errno.EIO, "simulated", str(folder))

    monkeypatch.setattr(run_claim, "copy_all_rests", fail)
    RunClaim(load_job_text(JOB, "job"), claims=False).leave("failed")
    assert "how job has ended is not in its folder" in caplog.text
