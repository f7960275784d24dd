# SPDX-License-Identifier: Apache-2.0
"""``RLJobBuilder`` from Python, and jobs checked without being run."""

from dataclasses import replace
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import CallError, InvalidJob, JobFailed
from dlrover.python.rl.config.spec import CheckpointSpec
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import RLJobBuilder, check_job
from dlrover.python.rl.master.process.brain import run_local
from dlrover.python.rl.runtime.checkpoint.journal_store import StateStore
from tests.support.toy_jobs import toy_job


def builder(trainer="Loop"):
    made = RLJobBuilder().device_type("CPU").device_per_node(4).config({"steps": 2})
    return made.trainer("tests.support.toy_jobs", trainer).actor("tests.support.toy_jobs", "Adder").total(2)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_described_job_has_its_spec_and_nothing_is_started(tmp_path):
    job = builder().rollout("tests.support.toy_jobs", "Adder").total(2).with_collocation("actor", "rollout").build()
    spec = job.spec("my-job")
    assert (spec.name, dict(spec.groups[0])) == ("my-job", {"ACTOR": 2, "ROLLOUT": 2})
    assert list(tmp_path.iterdir()) == []


def test_building_reports_every_error():
    with pytest.raises(InvalidJob, match="2 errors"):
        RLJobBuilder().trainer("m", "T").node_num(0).build()
    with pytest.raises(InvalidJob, match="impossible placement: ACTOR x 9"):
        builder().total(9).build()


def test_a_job_runs_in_this_process():
    status = builder().build().submit("my-job", local=True)
    assert (status.name, status.phase, status.step) == ("my-job", Phase.FINISHED, 2)


def test_a_failed_job_raises_with_its_cause_and_traceback():
    with pytest.raises(JobFailed, match=r"(?s)my-job failed: trainer: ValueError: the user's own words.*Traceback"):
        builder("FailingInit").build().submit("my-job", local=True)


def test_a_wrong_job_raises_and_starts_nothing(tmp_path):
    with pytest.raises(InvalidJob, match="did you mean 'Loop'"):
        builder("Lop").build().submit("my-job", local=True)
    with pytest.raises(InvalidJob, match="'My Job' is not a job name"):
        builder().build().submit("My Job", local=True)
    assert list(tmp_path.iterdir()) == []


def test_what_submit_is_not_told_stays_as_the_job_says(tmp_path):
    job = builder().restart_limits(job_max_restart=3).build()
    job.submit("my-job", local=True)
    assert "job_max_restart: 3" in (tmp_path / "runs/my-job/latest/job.yaml").read_text()
    job.submit("my-job", local=True, job_max_restart=0, master_cpu=1)
    text = (tmp_path / "runs/my-job/latest/job.yaml").read_text()
    assert "job_max_restart: 0" in text
    assert "master:\n  cpu: 1.0\n  memory: 0.0" in text


def test_a_job_that_is_not_waited_for_needs_a_cluster_of_its_own():
    with pytest.raises(CallError, match=r"submit\(blocking=False\) needs address="):
        builder().build().submit("my-job", blocking=False)


def test_a_checked_job_knows_its_plan_and_its_methods(tmp_path):
    checked = check_job(toy_job(tmp_path / "out"), local=True)
    assert len(checked.placement.bundles) == 2
    assert "add" in checked.inspection.methods["REWARD"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, False])
def test_a_copy_of_other_members_is_not_gone_on_from_and_stays(tmp_path, local):
    def job(steps, members):
        made = toy_job(tmp_path / "out", members=members, steps=steps)
        return replace(made, checkpoint=CheckpointSpec(resume="latest"), search_path=(str(Path(__file__).parents[3]),))

    def run(checked):
        reports = []
        status = run_local(checked.job, checked.placement, reports.append, StateStore())
        assert status.phase is Phase.FINISHED
        return [report.step for report in reports]

    assert run(check_job(job(2, 2), local=True)) == [1, 2]
    copies = sorted((tmp_path / "out" / "checkpoints").glob("*/step-*"))
    assert copies
    with pytest.raises(
        InvalidJob, match=r"checkpoint.resume: .*step-00000002.e1 holds the state of ACTOR x2, REWARD x2"
    ):
        check_job(job(3, 1), local)
    assert sorted((tmp_path / "out" / "checkpoints").glob("*/step-*")) == copies
    assert run(check_job(job(3, 2), local)) == [3]
