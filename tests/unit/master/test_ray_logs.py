# SPDX-License-Identifier: Apache-2.0
"""The logs of a job on a Ray cluster, which are read from its folder."""

from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.master.client.jobs import JobView
from dlrover.python.rl.master.client.on_ray import RayJobs


class OneJob(RayJobs):
    """A job that ends when its log has been read once."""

    def __init__(self, view):
        self._view = view

    def get(self, name):
        view, self._view = self._view, replace(self._view, ended=True)
        return view


@pytest.fixture
def jobs(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/trainer.log").write_text("one\n")
    return OneJob(JobView("job", "running", folder=str(tmp_path), roles={"ROLLOUT": 2}))


@pytest.mark.parametrize("follow", [False, True])
def test_a_wrong_process_is_an_error_with_the_nearest_name(jobs, follow):
    with pytest.raises(InvalidJob, match="trainr: has no log; did you mean 'trainer'"):
        list(jobs.logs("job", "trainr", follow, 0))


def test_a_process_that_has_no_log_yet_is_waited_for_until_the_job_has_ended(jobs):
    with pytest.raises(InvalidJob, match="rollout-1: has no log"):
        list(jobs.logs("job", "rollout-1", False, 0))
    jobs._view = replace(jobs._view, ended=False)
    logs = jobs.logs("job", "rollout-1", True, 0)
    with pytest.raises(InvalidJob, match="rollout-1: has no log"):  # after the end
        next(logs)


def test_a_log_is_followed_to_the_end_of_its_job(jobs):
    assert list(jobs.logs("job", "trainer", True, 0)) == [("trainer", "one\n")]
