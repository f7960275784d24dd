# SPDX-License-Identifier: Apache-2.0
"""Whole jobs under a real master on real Ray."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from dlrover.python.rl.common.errors import InvalidJob, JobConflict
from dlrover.python.rl.common.names import NAMESPACE, master_name
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.control.events import CauseKind
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.client.on_ray import follow, start_master, stop_master
from dlrover.python.rl.master.job import check_job, run_on_ray
from dlrover.python.rl.master.process.rl_master import RLMaster
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.ray.processes.actors import end, launch
from dlrover.python.rl.runtime.run.folder import begin
from tests.ray.recovery_stage import memory_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def describe(tmp_path, monkeypatch, act, name, **config):
    """A job of two actors whose trainer does ``act``."""
    monkeypatch.chdir(tmp_path)
    builder = JobBuilder().device_type("CPU").device_per_node(4).trainer("tests.ray.jobs", "Trainer")
    builder.config({"folder": str(tmp_path), "act": act, **config}).actor("tests.ray.jobs", "Worker").total(2)
    builder.restart_limits(job_max_restart=2, backoff_s=0.1)
    return replace(builder.spec(name, (str(Path(__file__).parents[2]),)), job_dir=tmp_path / "out")


def run(job, **options):
    reports = []
    status = run_on_ray(check_job(job), reports.append, connected=True, **options)
    return status, reports


def runs(tmp_path):
    return (tmp_path / "count").read_text().count("run")


def nothing_is_left(name):
    """No actor of the job, no placement group, and nothing in shared memory."""
    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    groups = [group for group in ray.util.placement_group_table().values() if group["name"].startswith(name)]
    return (
        not [actor for actor in actors if actor.startswith(f"{name}/")]
        and all(group["state"] == "REMOVED" for group in groups)
        and not memory_of(name)
    )


def wait_until(condition, deadline_s=20.0):
    event, began_s = threading.Event(), time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < deadline_s, "the deadline passed"
        event.wait(0.05)


def test_a_job_whose_workloads_ask_the_master_runs_to_its_end_reports_its_steps_and_leaves_nothing(
    tmp_path, monkeypatch
):
    activities = []
    status, reports = run(describe(tmp_path, monkeypatch, "ask_and_step", "plain"), announce=activities.append)
    assert (status.phase, status.restarts, status.incarnation) == (Phase.FINISHED, 0, 1)
    assert (status.recoveries, status.masters) == ({}, 1)
    assert [(report.step, report.total_steps, report.metrics["reward"]) for report in reports] == [
        (1, 3, 4.0),
        (2, 3, 6.0),
        (3, 3, 8.0),
    ]
    assert activities[0] == "starting the master"
    assert "starting 2 processes" in activities
    assert status.activity == ""
    wait_until(lambda: nothing_is_left("plain"))


@pytest.mark.slow
def test_results_that_were_not_waited_for_are_taken_by_rays_own_functions(tmp_path, monkeypatch):
    status, reports = run(describe(tmp_path, monkeypatch, "rays_own_functions", "rays-own"))
    assert (status.phase, status.restarts, status.cause) == (Phase.FINISHED, 0, None)
    assert len(reports) == 3


def test_a_member_that_dies_under_ray_get_is_replaced_and_the_step_repeated(tmp_path, monkeypatch):
    status, reports = run(describe(tmp_path, monkeypatch, "loses_what_it_gets", "ray-get"))
    assert (status.phase, status.restarts) == (Phase.FINISHED, 0)
    assert sum(status.recoveries.values()) == 1
    assert [(report.step, report.metrics["reward"]) for report in reports][-3:] == [(1, 1.0), (2, 1.0), (3, 1.0)]


@pytest.mark.slow
def test_members_that_are_late_can_be_replaced_instead_of_waited_for(tmp_path, monkeypatch):
    status, reports = run(describe(tmp_path, monkeypatch, "replaces_the_late", "late"))
    assert (status.phase, status.restarts) == (Phase.FINISHED, 0), status.cause
    assert sum(status.recoveries.values()) == 2
    assert [report.metrics["reward"] for report in reports] == [4.0, 6.0]


def test_a_users_error_ends_the_job_at_once_with_role_rank_and_traceback(tmp_path, monkeypatch):
    status, _ = run(describe(tmp_path, monkeypatch, "user_error", "user-error"))
    assert (status.phase, status.restarts) == (Phase.FAILED, 0)
    assert status.cause.kind is CauseKind.USER_ERROR
    assert status.cause.who in ("ACTOR[0]", "ACTOR[1]")
    assert "the user's own mistake" in status.cause.message
    assert "jobs.py" in status.cause.detail
    assert "not retried" in status.reason
    assert runs(tmp_path) == 1


@pytest.mark.slow
def test_the_trainers_own_error_is_reported_as_such(tmp_path, monkeypatch):
    status, _ = run(describe(tmp_path, monkeypatch, "own_error", "own-error"))
    assert status.cause.who == "trainer"
    assert status.cause.message == "RuntimeError: the trainer's own mistake"
    assert "in own_error" in status.cause.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "culprit", "message"),
    [
        ("leave", "ACTOR[", "SystemExit: 5"),
        ("leave_trainer", "trainer", "6"),
    ],
)
def test_leaving_the_process_by_sys_exit_is_an_error_and_is_not_retried(tmp_path, monkeypatch, act, culprit, message):
    status, _ = run(describe(tmp_path, monkeypatch, act, act.replace("_", "-")))
    assert (status.phase, status.restarts, status.cause.kind) == (Phase.FAILED, 0, CauseKind.USER_ERROR)
    assert status.cause.who.startswith(culprit)  # every rank leaves: which is seen first is chance
    assert message in status.cause.message


@pytest.mark.slow
def test_an_exception_of_the_users_own_class_is_told_by_role_and_rank(tmp_path, monkeypatch):
    status, _ = run(describe(tmp_path, monkeypatch, "own_exception", "own-exception"))
    assert status.cause.kind is CauseKind.USER_ERROR
    assert status.cause.who in ("ACTOR[0]", "ACTOR[1]")
    assert "OwnError: of a module" in status.cause.message


@pytest.mark.slow
def test_relative_paths_are_meant_from_where_the_job_was_described(tmp_path, monkeypatch):
    job = describe(tmp_path, monkeypatch, "steps_only", "relative")
    job.config.folder = "."
    status, _ = run(job)
    assert status.phase is Phase.FINISHED
    assert runs(tmp_path) == 1


@pytest.mark.slow
def test_a_constructor_that_fails_is_reported_as_such(tmp_path, monkeypatch):
    status, _ = run(describe(tmp_path, monkeypatch, "steps_only", "broken", broken_rank=1))
    assert (status.phase, status.cause.kind) == (Phase.FAILED, CauseKind.START_FAILED)
    assert status.cause.who == "ACTOR[1]"
    assert "does not like this rank" in status.cause.message
    assert not (tmp_path / "count").exists()


@pytest.mark.parametrize(
    "act", ["death", *(pytest.param(other, marks=pytest.mark.slow) for other in ("swallowed_death", "trainer_death"))]
)
def test_a_process_that_dies_restarts_the_job_exactly_once(tmp_path, monkeypatch, act):
    name = act.replace("_", "-")
    status, _ = run(describe(tmp_path, monkeypatch, act, name))
    assert (status.phase, status.restarts, status.incarnation) == (Phase.FINISHED, 1, 2)
    assert runs(tmp_path) == 2
    events = [event for _, event in decode(read_lines(tmp_path / "out" / "journal.jsonl"))]
    assert [event.cause.kind for event in events if hasattr(event, "cause")] == [CauseKind.PROCESS_DIED]
    wait_until(lambda: nothing_is_left(name))


@pytest.mark.slow
def test_a_crash_loop_ends_at_the_limit_with_the_cause(tmp_path, monkeypatch):
    status, _ = run(describe(tmp_path, monkeypatch, "deaths", "crash-loop"))
    assert (status.phase, status.restarts) == (Phase.FAILED, 2)
    assert "the limit of 2 restarts" in status.reason
    assert status.cause.kind is CauseKind.PROCESS_DIED
    assert runs(tmp_path) == 3


def test_the_master_answers_at_once_and_stops_a_running_job(tmp_path, monkeypatch):
    checked = check_job(describe(tmp_path, monkeypatch, "endless", "endless"))
    master = start_master(checked)
    try:
        wait_until(lambda: ray.get(master.status.remote(), timeout=10).step > 2, 60)
        began_s = time.monotonic()
        status = ray.get(master.status.remote(), timeout=10)
        assert time.monotonic() - began_s < 0.5
        assert {process for process, *_ in status.members} == {"ACTOR[0]", "ACTOR[1]", "trainer"}
        with pytest.raises(JobConflict, match="'endless' is running"):
            start_master(checked)
        stop_master(master, "enough")
        wait_until(lambda: ray.get(master.status.remote(), timeout=10).phase.terminal)
        status = ray.get(master.status.remote(), timeout=10)
        assert (status.phase, status.reason) == (Phase.STOPPED, "enough")
    finally:
        end(master)
    wait_until(lambda: nothing_is_left("endless"))


@pytest.mark.slow
def test_the_name_of_an_ended_job_can_be_used_again(tmp_path, monkeypatch):
    checked = check_job(describe(tmp_path, monkeypatch, "steps_only", "again"))
    first = start_master(checked)
    wait_until(lambda: ray.get(first.status.remote(), timeout=10).phase.terminal, 60)
    status, _ = run(replace(checked.job, job_dir=tmp_path / "second"))
    assert status.phase is Phase.FINISHED
    with pytest.raises(ValueError, match="Failed to look up"):
        ray.get_actor(master_name("again"), namespace=NAMESPACE)


def test_resources_that_the_cluster_lacks_end_the_job_with_need_and_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    builder = JobBuilder().device_type("CPU").device_per_node(400).trainer("tests.ray.jobs", "Trainer")
    builder.config({"folder": str(tmp_path), "act": "steps_only"}).actor("tests.ray.jobs", "Worker").total(200)
    spec = builder.spec("too-big", (str(Path(__file__).parents[2]),))
    status, _ = run(replace(spec, placement_timeout_s=1.0))
    assert (status.phase, status.cause.kind) == (Phase.FAILED, CauseKind.NO_RESOURCES)
    assert "needed {'cpu': 200.0}" in status.cause.message
    assert "free {" in status.cause.message
    wait_until(lambda: nothing_is_left("too-big"))


def test_a_job_that_can_never_fit_is_refused_before_anything_starts(tmp_path, monkeypatch):
    job = describe(tmp_path, monkeypatch, "steps_only", "never")
    small = replace(job, trainer=replace(job.trainer, device_per_node=1))
    with pytest.raises(InvalidJob, match="impossible placement: ACTOR x 2 do not fit 1 node"):
        check_job(small)


@pytest.mark.slow
def test_a_master_whose_own_loop_breaks_releases_everything_and_says_that_it_failed(tmp_path, monkeypatch):
    class FragileMaster(RLMaster):
        def _carry_out(self, handled):
            if type(handled.event).__name__ == "TrainerStarted":
                raise RuntimeError("the loop's own mistake")
            super()._carry_out(handled)

    checked = check_job(describe(tmp_path, monkeypatch, "endless", "fragile"))
    arguments = (begin(checked.job), checked.placement, checked.inspection)
    master = launch(FragileMaster, master_name("fragile"), arguments, {})
    try:
        ray.get(master.start.remote({}), timeout=30)
        status = follow(master, deadline_s=90)
        assert (status.phase, status.cause.kind, status.cause.who) == (Phase.FAILED, CauseKind.INTERNAL, "master")
        assert "the loop's own mistake" in status.cause.message
    finally:
        end(master)
    wait_until(lambda: nothing_is_left("fragile"))


@pytest.mark.slow
def test_two_jobs_run_side_by_side_on_one_cluster(tmp_path, monkeypatch):
    masters = {}
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        masters[name] = start_master(check_job(describe(tmp_path / name, monkeypatch, "steps_only", name)))
    for name, master in masters.items():
        status = follow(master, deadline_s=90)
        assert (status.phase, status.restarts) == (Phase.FINISHED, 0), status
        assert runs(tmp_path / name) == 1
        end(master)
